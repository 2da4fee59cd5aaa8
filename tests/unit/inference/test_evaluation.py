"""The metrics of an evaluation, computed by hand from the log-probabilities of lm.score."""

import math
import os
import shutil

import numpy as np
import pytest

from lm.config import Config
from lm.errors import UserError
from lm.inference.evaluation import evaluate
from lm.inference.scorer import Scorer
from lm.inference.trained_run import open_run
from lm.tokens.symbols import Bytes, Characters
from lm.tokens.tokenizers import Words
from lm.tokens.vocabulary import Vocabulary
from tests.unit.data.texts import write
from tests.untrained import make_run, write_run

SENTENCE = "thé cat  sat on thé mat"
WORDS = ("<eos>", "<unk>", "thé", "cat", "sat", "on", "mat")
CHARACTERS = ("<eos>", "U+0020", *"théocasnm")
WORD = Words(Vocabulary(WORDS))


def subwords(tmp_path):
    """Return a byte-level BPE."""
    tokenizers = pytest.importorskip("tokenizers")
    from lm.tokens.subwords import load_subwords

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=262, initial_alphabet=alphabet)
    bpe.train_from_iterator([SENTENCE], trainer)
    bpe.save(str(tmp_path / "bpe.json"))
    return load_subwords(str(tmp_path / "bpe.json"))


def test_all_ranks_reject_lines_of_token_ids_with_one_error(tmp_path):
    write_run(str(tmp_path / "run"), Config(hidden_size=2), WORD)
    np.save(tmp_path / "ids.npy", np.int32([2, 0]))
    with pytest.raises(UserError, match=r"--lines needs text, but .*ids.npy") as error:
        evaluate(open_run(str(tmp_path / "run")), [str(tmp_path / "ids.npy")], lines=True)
    assert error.value.on_every_rank


@pytest.mark.parametrize(
    "kind, num_tokens", [("words", 7), ("characters", 24), ("bytes", 26), ("subwords", 15)]
)
def test_metrics_agree_with_the_scores_of_the_text(tmp_path, kind, num_tokens):
    tokenizer = {
        "words": lambda: WORD,
        "characters": lambda: Characters(Vocabulary(CHARACTERS)),
        "bytes": Bytes,
        "subwords": lambda: subwords(tmp_path),
    }[kind]()
    directory, path = str(tmp_path / "run"), tmp_path / "text"
    write_run(directory, Config(hidden_size=24, init_scale=0.8), tokenizer)
    path.write_text(SENTENCE + "\n")
    run = open_run(directory)
    (found,) = evaluate(run, [str(path)], eval_batch_size=1)
    (score,) = Scorer(run, 1).score([SENTENCE])
    assert found["tokens"] == len(score.log_probs) == num_tokens
    bits = -score.log_prob / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / 26)  # each é has two bytes
    assert found["word_perplexity"] == pytest.approx(math.exp(-score.log_prob / 7))
    if kind == "characters":
        assert found["bits_per_character"] == pytest.approx(bits / 24)
    else:
        assert "bits_per_character" not in found
    assert (found["word_perplexity"] == found["perplexity"]) == (kind == "words")


def test_a_pipe_is_an_error_before_it_is_opened(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=4), WORD)
    os.mkfifo(tmp_path / "pipe")  # Opening it would wait for a writer.
    with pytest.raises(UserError, match="pipe must be train, valid, test or the path of a text"):
        evaluate(open_run(str(tmp_path / "run")), [str(tmp_path / "pipe")])


def test_a_split_is_evaluated_without_encoding_the_others(tmp_path):
    data_path, run = write(tmp_path / "d"), str(tmp_path / "run")
    make_run(run, data_path, corpus="files")
    expected = evaluate(open_run(run), ["valid", "test"])
    shutil.rmtree(tmp_path / "d/.cache")
    assert evaluate(open_run(run), ["valid", "test"]) == expected
    assert not (tmp_path / "d/.cache").exists()
    (tmp_path / "d/test.txt").unlink()
    with pytest.raises(UserError, match="has no test split"):
        evaluate(open_run(run), ["test"])


def test_the_user_is_warned_of_other_texts_than_ptb(tmp_path, caplog):
    data_path = write(tmp_path / "d", prefix="ptb.")
    make_run(tmp_path / "run", data_path, corpus="files")
    evaluate(open_run(tmp_path / "run"), ["valid"], data_path=data_path)
    assert "ptb.valid.txt is not the published PTB" in caplog.text


def test_a_long_evaluation_logs_the_remaining_time(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "lm")
    monkeypatch.setattr("lm.model.evaluator._LOG_SECONDS", -1)
    write_run(str(tmp_path / "run"), Config(hidden_size=2, num_steps=5), WORD)
    (tmp_path / "text").write_text("cat " * 8 + "\n")  # two windows
    evaluate(open_run(tmp_path / "run"), [str(tmp_path / "text")], eval_batch_size=1)
    lines = [line for line in caplog.messages if line.startswith("evaluated ")]
    assert len(lines) == 2 and lines[0].startswith("evaluated 50%, left 00:")
    assert lines[1] == "evaluated 100%, left 00:00"
