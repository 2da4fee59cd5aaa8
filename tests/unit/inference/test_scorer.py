"""Reading and scoring sentences."""

import dataclasses
import json
import re

import numpy as np
import pytest
import tensorflow.compat.v2 as tf2
from tensorflow.core.protobuf import saved_model_pb2

from lm import kernels
from lm.checkpoint import store
from lm.checkpoint.tensors import load_arrays, tensor_shapes, whole
from lm.config import Config
from lm.distributed.supervisor import Waiting
from lm.errors import EveryRankError, UserError
from lm.inference import scorer as scorer_module
from lm.inference.evaluation import evaluate
from lm.inference.lines import read_lines
from lm.inference.nbest import rescore
from lm.inference.saved_model import export
from lm.inference.scorer import Scorer
from lm.inference.trained_run import open_run
from lm.score import ScoreOptions, Totals, format_score
from lm.tokens.symbols import Bytes, Ids
from lm.tokens.tokenizers import Words
from lm.tokens.vocabulary import Vocabulary
from tests.untrained import write_run

WORDS = ("<eos>", "<unk>", *(f"w{i}" for i in range(30)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("runs") / "run")
    write_run(directory, Config(hidden_size=32, init_scale=0.8), Words(Vocabulary(WORDS)))
    return open_run(directory)


@pytest.fixture
def sentences():
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS[2:], length)) for length in random.integers(0, 40, 50)]


def test_a_score_does_not_depend_on_other_sentences(run, sentences):
    scorer = Scorer(run, batch_size=8)
    scores = list(scorer.score(sentences))
    assert [len(score.log_probs) for score in scores] == [len(s.split()) + 1 for s in sentences]
    for index, (score, sentence) in enumerate(zip(scores, sentences)):
        # Without the compiled operations, the sentence stays in its row, after empty rows.
        before = [] if kernels.available() else [""] * (index % 8)
        alone = list(scorer.score([*before, sentence]))[-1]
        assert str(alone) == str(score)


def test_sentences_of_similar_length_are_scored_together_in_rows_that_are_needed(run, monkeypatch):
    if not kernels.available():
        pytest.skip("plain TensorFlow rounds differently in other rows")
    scorer, shapes = Scorer(run, batch_size=2), []
    compute = scorer._log_probs
    monkeypatch.setattr(
        scorer, "_log_probs", lambda targets: [shapes.append(targets.shape), compute(targets)][1]
    )
    texts = ["w1 w2 w3 w4", "w1", "", "w5 w6 w7", "w2"]
    assert [score.text for score in scorer.score(texts)] == texts
    assert shapes == [(2, 2), (4, 2), (5, 1)]
    scorer.rows, shapes[:] = 48, []  # as in a later call of lm.api
    assert len(list(scorer.score(["w1"] * 48))) == 48 and shapes == [(2, 48)]


def test_an_evaluation_of_lines_sorts_them_and_reports_progress_after_each_batch(
    run, sentences, tmp_path, monkeypatch
):
    if not kernels.available():
        pytest.skip("plain TensorFlow rounds differently in other rows")
    lengths, polls = [], []
    compute, poll = Scorer._log_probs, Waiting.poll
    monkeypatch.setattr(
        Scorer, "_log_probs", lambda *args: [lengths.append(len(args[1])), compute(*args)][1]
    )
    monkeypatch.setattr(Waiting, "poll", lambda *args: [polls.append(args), poll(*args)])
    (tmp_path / "text.txt").write_text("".join(f"{sentence}\n" for sentence in sentences))
    path = str(tmp_path / "text.txt")
    (several,) = evaluate(run, [path], eval_batch_size=3, lines=True)
    assert lengths == [*sorted(lengths[:16]), *sorted(lengths[16:])] and len(lengths) == 17
    assert len(polls) == 17
    (each,) = evaluate(run, [path], eval_batch_size=1, lines=True)
    assert (several["nll"], several["tokens"]) == (each["nll"], each["tokens"])


def test_long_lines_are_scored_in_chunks_with_the_same_results(run, sentences, monkeypatch):
    scores, polls = {}, []
    for size in (1000, 7):
        monkeypatch.setattr(scorer_module, "_CHUNK_STEPS", size)
        for continuous in (False, True):
            scorer = Scorer(run, 8, continuous)
            scorer.poll = lambda size=size: polls.append(size)
            scores[size, continuous] = list(map(str, scorer.score(sentences)))
    assert scores[7, False] == scores[1000, False]
    assert scores[7, True] == scores[1000, True] != scores[7, False]
    assert polls.count(7) > 1.5 * polls.count(1000)


def test_unknown_words_are_scored_as_unk_and_counted(run):
    known, unknown = Scorer(run, 2).score(["w1 <unk> w2", "w1  zebra\tw2"])
    np.testing.assert_array_equal(known.log_probs, unknown.log_probs)
    assert (known.unknown, unknown.unknown) == (0, 1)


def test_without_unk_an_unknown_word_is_an_error_after_the_lines_before_it(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=4), Words(Vocabulary(("<eos>", "a"))))
    (tmp_path / "text").write_text("a\n\na a\na zebra\na\n")
    for batch_size in (1, 2, 3, 8):
        scorer, found = Scorer(open_run(tmp_path / "run"), batch_size), []
        (lines,) = read_lines(str(tmp_path / "text"))
        with pytest.raises(UserError, match=r"^text, line 4: 'zebra' is not in the"):
            found.extend(scorer.score(lines, "text, line"))
        assert [score.text for score in found] == ["a", "", "a a"]


def test_the_columns_of_the_output(run):
    (score,) = Scorer(run, 4).score(["w1 zebra"])
    cells = format_score(score, ScoreOptions(per_word=True), run.tokenizer).split("\t")
    assert float(cells[0]) == pytest.approx(score.log_prob, abs=1e-6)
    assert cells[1:4] == ["3", "1", "w1 zebra"]
    assert [float(cell) for cell in cells[4].split()] == pytest.approx(score.log_probs, abs=1e-6)
    assert format_score(score, ScoreOptions(), run.tokenizer) == "\t".join(cells[:4])
    as_json = json.loads(format_score(score, ScoreOptions(format="json"), run.tokenizer))
    assert as_json["log_probability"] == score.log_prob and as_json["unknown"] == 1
    options = ScoreOptions(format="json", per_word=True)
    as_json = json.loads(format_score(score, options, run.tokenizer))
    assert as_json["token_texts"] == ["w1", " <unk>", "\n"]
    assert as_json["token_log_probabilities"] == score.log_probs.tolist()


def test_totals_of_json_agree_with_the_lines_and_are_valid_json(run):
    totals = Totals(run.tokenizer.unk_id)
    assert totals.as_dict()["perplexity"] is None
    scores = list(Scorer(run, 4).score(["w1 zebra", "<unk>", "w2"]))
    for score in scores:
        totals.add(score)
    found = totals.as_dict()
    assert found["unknown"] == sum(score.unknown for score in scores) == 1
    assert found["log_probability"] == sum(score.log_prob for score in scores)


def test_the_output_of_kenlm_has_the_arithmetic_of_kenlm(run):
    """KenLM adds up log10-probabilities, in lm/ngram_query.hh of its source."""
    scores = list(Scorer(run, 4).score(["w1 zebra w2", "<unk>", "w3"]))
    totals, tokenizer = Totals(run.tokenizer.unk_id), run.tokenizer
    total = total_of_unknown = num_unknown = num_tokens = 0
    for score, words in zip(scores, (["w1", "zebra", "w2"], ["<unk>"], ["w3"])):
        cells = format_score(score, ScoreOptions(format="kenlm"), tokenizer).split("\t")
        totals.add(score)
        line_total = line_unknown = 0
        for position, (cell, word) in enumerate(zip(cells, [*words, "</s>"], strict=False)):
            name, length, log10 = cell.split(" ")
            known = {w: i + 1 for i, w in enumerate(WORDS)}
            number = known["<eos>"] if word == "</s>" else known.get(word, 0)
            number *= word != "<unk>"
            assert (name, length) == (f"{word}={number}", str(position + 2))
            line_total += float(log10)
            line_unknown += number == 0
            total_of_unknown += float(log10) * (number == 0)
            num_tokens += 1
        label, value, oov, count = cells[-1].split(" ")
        assert (label, oov, int(count)) == ("Total:", "OOV:", line_unknown)
        assert float(value) == pytest.approx(line_total, rel=1e-5)
        total, num_unknown = total + line_total, num_unknown + line_unknown
    lines = [line.split("\t") for line in totals.as_kenlm().splitlines()]
    assert [name for name, _ in lines] == [
        "Perplexity including OOVs:", "Perplexity excluding OOVs:", "OOVs:", "Tokens:",
    ]  # fmt: skip
    known = num_tokens - num_unknown
    expected = 10 ** -(total / num_tokens), 10 ** -((total - total_of_unknown) / known)
    assert [float(value) for _, value in lines[:2]] == pytest.approx(expected, rel=1e-5)
    assert [int(value) for _, value in lines[2:]] == [num_unknown, num_tokens] == [2, 8]


def test_lines_and_streams_have_the_totals_of_an_evaluation(run, sentences, tmp_path):
    """An evaluation computes windows, and a stream is scored token by token."""
    (tmp_path / "text").write_text("".join(f"{sentence}\n" for sentence in sentences))
    text = [str(tmp_path / "text")]
    for lines in (True, False):
        (found,) = evaluate(run, text, lines=lines, eval_batch_size=1)
        scores = list(Scorer(run, 8, continuous=not lines).score(sentences))
        assert found["tokens"] == sum(len(score.ids) for score in scores)
        total = sum(score.log_prob for score in scores)
        assert -found["nll"] * found["tokens"] == pytest.approx(total, rel=1e-6)


def test_nbest_lists_are_sorted_by_their_score_with_the_log_probability(run):
    lines = [
        "0 ||| w1 w2 ||| LM0= -3 ||| -5 ||| 0-0", "0 ||| w3 ||| LM0= -2 ||| -9",
        "1 ||| w4 w5 w6 ||| ", "1 ||| w7 |||",
    ]  # fmt: skip
    scores = [s.log_prob for s in Scorer(run, 8).score(["w1 w2", "w3", "w4 w5 w6", "w7"])]
    totals = [-5 + 0.5 * scores[0], -9 + 0.5 * scores[1], 0.5 * scores[2], 0.5 * scores[3]]
    expected = [
        f"0 ||| w1 w2 ||| LM0= -3 lm= {scores[0]:.6f} ||| {totals[0]:.6f} ||| 0-0",
        f"0 ||| w3 ||| LM0= -2 lm= {scores[1]:.6f} ||| {totals[1]:.6f}",
        f"1 ||| w4 w5 w6 ||| lm= {scores[2]:.6f} ||| {totals[2]:.6f}",
        f"1 ||| w7 ||| lm= {scores[3]:.6f} ||| {totals[3]:.6f}",
    ]
    order = sorted(range(4), key=lambda i: (i // 2, -totals[i]))
    found = list(rescore(lines, Scorer(run, 8), 0.5, "list"))
    assert found == [expected[i] for i in order]
    with pytest.raises(UserError, match=r"list, line 2 must be `id \|\|\| text"):
        list(rescore(["0 ||| w1 ||| ", "0 ||| w1"], Scorer(run, 8), 1, "list"))


def test_nan_is_an_error(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=4), Words(Vocabulary(WORDS)))
    trained = store.find(str(tmp_path / "run"))
    arrays = load_arrays(trained.path, tensor_shapes(trained.path))
    nothing = {name: np.full_like(array, np.nan) for name, array in arrays.items()}
    progress = dataclasses.replace(trained.manifest.progress, step=8)
    spoilt = dataclasses.replace(trained.manifest, progress=progress)
    store.save(str(tmp_path / "run"), [whole(nothing)], spoilt)
    with pytest.raises(UserError, match="the network returns NaN: use a different checkpoint"):
        list(Scorer(open_run(tmp_path / "run")).score(["w1"]))
    (tmp_path / "text").write_text("w1\n")
    with pytest.raises(EveryRankError, match="so its perplexity is not finite"):
        evaluate(open_run(tmp_path / "run"), [str(tmp_path / "text")])


def test_a_byte_order_mark_is_ignored_and_other_invalid_utf8_is_an_error(tmp_path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfw1 w2\nw3 \xff\nnever read\n")
    found, place = [], re.escape(f"{tmp_path}/text")
    with pytest.raises(UserError, match=f"^{place}, line 2: not UTF-8: byte 0xff"):
        found.extend(read_lines(str(tmp_path / "text")))
    assert found == [["w1 w2"]]


def test_each_file_of_a_split_may_start_with_a_byte_order_mark(run, tmp_path):
    (tmp_path / "marked").mkdir()
    (tmp_path / "plain").mkdir()
    for name, text in [("1.txt", "w1 w2\n"), ("2.txt", "w3 w4\n")]:
        (tmp_path / "marked" / name).write_text(text, "utf-8-sig")
        (tmp_path / "plain" / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("marked", "plain")]
    marked, plain = evaluate(run, paths, lines=True)
    assert (marked["unknown"], marked["nll"]) == (0, plain["nll"])


def test_lines_of_exact_tokenizers_contain_all_bytes(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=8), Bytes())
    content = b"a <eos> b\r\n\r\nc\rd\n"
    (tmp_path / "text").write_bytes(content)
    for lines in (True, False):
        (found,) = evaluate(open_run(tmp_path / "run"), [str(tmp_path / "text")], lines=lines)
        assert found["tokens"] == len(content)


def test_texts_of_token_ids_may_be_empty(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=8), Ids(10))
    for continuous in (True, False):
        scores = list(Scorer(open_run(tmp_path / "run"), 2, continuous).score(["", "5 3", ""]))
        assert [len(score.log_probs) for score in scores] == [0, 2, 0]
        assert scores[0].log_prob == 0 > scores[1].log_prob


def test_an_export_scores_short_texts_like_the_run(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=8, init_scale=0.8), Bytes())
    run, texts = open_run(tmp_path / "run"), ["the cat", "a", ""]
    export(run, str(tmp_path / "exported"))
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((tmp_path / "exported/saved_model.pb").read_bytes())
    assert saved.meta_graphs[0].meta_info_def.stripped_default_attrs
    model = tf2.saved_model.load(str(tmp_path / "exported"))
    rows = [[*text.encode(), *[-1] * (7 - len(text))] for text in texts]
    found = model.signatures["score_ids"](ids=tf2.constant(rows))
    expected = [score.log_prob for score in Scorer(run, 3).score(texts)]
    np.testing.assert_allclose(found["log_probability"], expected, rtol=1e-5)
    with pytest.raises(tf2.errors.InvalidArgumentError, match="padding inside a text"):
        model.signatures["score_ids"](ids=tf2.constant([[1, 2, 3], [1, -1, 3]]))
