"""Texts in the vocabulary of a run, and the opening of runs."""

import shutil

import numpy as np
import pytest

from lm.checkpoint import store
from lm.checkpoint.tensors import tensor_shapes
from lm.config import Config
from lm.errors import RunError, UserError
from lm.inference.evaluation import evaluate, load_text
from lm.inference.scorer import Scorer
from lm.inference.trained_run import Run, open_run
from lm.tokens.tokenizers import Words
from lm.tokens.vocabulary import Vocabulary
from tests.limits import file_size_limit
from tests.untrained import rewrite_manifest, write_run

WITH_UNK = Words(Vocabulary(("<eos>", "<unk>", "a", "bcd", "é")))
WITHOUT_UNK = Words(Vocabulary(("<eos>", "a")))


def run_of(tokenizer):
    return Run("runs/x", Config(), tokenizer, "runs/x/checkpoints/step-00000001")


def test_a_file_is_encoded_with_the_vocabulary_of_the_run(tmp_path):
    path = tmp_path / "text"
    path.write_text(" a  zebra \n<unk> é", encoding="utf-8")
    text = load_text(run_of(WITH_UNK), str(path))
    assert [WITH_UNK.tokens[i] for i in text.ids] == ["a", "<unk>", "<eos>", "<unk>", "é", "<eos>"]
    assert text.encoded.unknown == 1  # a literal <unk> is an ordinary word
    with pytest.raises(UserError, match="3 words that are not in the run's vocabulary"):
        load_text(run_of(WITHOUT_UNK), str(path))
    with pytest.raises(UserError, match="--split dev must be train, valid, test or the path of"):
        load_text(run_of(WITH_UNK), "dev")


def test_a_full_temporary_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "text").write_text("a a a\n")
    message = rf"^cannot write to {tmp_path} \(File too large\): free some space, or set TMPDIR"
    with file_size_limit(4), pytest.raises(RunError, match=message):
        load_text(run_of(WITH_UNK), str(tmp_path / "text"))


def test_token_ids_may_have_another_type_than_in_the_training(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=3), WITH_UNK)
    np.array([2, 3, 0] * 20, np.uint32).tofile(tmp_path / "ids.bin")
    path, options = [str(tmp_path / "ids.bin")], {"eval_batch_size": 1}
    run = open_run(tmp_path / "run")
    (found,) = evaluate(run, path, token_dtype="uint32", **options)
    assert found["tokens"] == 60
    with pytest.raises(UserError, match=r"every second value .* set --token_dtype uint32"):
        evaluate(run, path, **options)


def test_a_removed_checkpoint_is_named(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=3), WITH_UNK)
    run = open_run(tmp_path / "run")
    shutil.rmtree(run.checkpoint.path)
    with pytest.raises(RunError, match="step-00000007 no longer exists, because a run that is"):
        Scorer(run)


def test_weights_of_another_run_are_used_with_their_settings_and_need_its_vocabulary(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=3), WITH_UNK)
    write_run(tmp_path / "other", Config(hidden_size=3, forget_bias=1.0, num_epochs=9), WITH_UNK)
    found = str(tmp_path / "other/checkpoints/step-00000007")
    assert open_run(tmp_path / "run", found).config.forget_bias == 1.0
    write_run(tmp_path / "without", Config(hidden_size=3), WITHOUT_UNK)
    with pytest.raises(UserError, match=r"a different vocabulary than .*/without: restore"):
        open_run(tmp_path / "without", found)


def test_a_run_opens_with_its_config_vocabulary_and_weights(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=3), WITH_UNK)
    for which in ["last", "best", str(tmp_path / "run/checkpoints/step-00000007")]:
        run = open_run(tmp_path / "run", which)
        assert (run.config.hidden_size, run.tokenizer.tokens) == (3, WITH_UNK.tokens)
        assert tensor_shapes(run.checkpoint.path)["embedding"] == [5, 3]
        assert run.checkpoint == store.find(str(tmp_path / "run"))
    run = open_run(str(tmp_path / "run/checkpoints/step-00000007"))
    assert (run.directory, run.checkpoint.path[-13:]) == (str(tmp_path / "run"), "step-00000007")


def test_a_checkpoint_is_found_behind_a_link_and_needs_its_run(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=3), WITH_UNK)
    path = tmp_path / "run/checkpoints/step-00000007"
    (tmp_path / "best").symlink_to(path)
    assert open_run(str(tmp_path / "best")).directory == str(tmp_path / "run")
    shutil.copytree(path, tmp_path / "a/b/copy")
    with pytest.raises(UserError, match="copy is not inside a run: pass RUN/checkpoints/step-N"):
        open_run(str(tmp_path / "a/b/copy"))


def test_older_configs_get_defaults_and_newer_or_invalid_ones_are_rejected(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=3), WITH_UNK)

    def change_config(change):
        checkpoint = tmp_path / "run/checkpoints/step-00000007"
        rewrite_manifest(checkpoint, lambda content: change(content["record"]["config"]))

    change_config(lambda config: config.pop("warmup_steps"))
    assert open_run(tmp_path / "run").config.warmup_steps == Config().warmup_steps
    change_config(lambda config: config.update(flux=1))
    with pytest.raises(UserError, match=r"manifest.json was written by .*unknown field 'flux'"):
        open_run(tmp_path / "run")
    change_config(lambda config: (config.pop("flux"), config.update(batch_size=0)))
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        open_run(tmp_path / "run")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("run.json", None, "is not a run: it has no run.json"),
        ("run.json", "{", r"run.json is corrupt: Expecting .*; restore it, or remove it and"),
        ("run.json", "[]", "it must be a JSON object"),
        ("run.json", '{"config": {}}', "run.json is corrupt: .*missing 2 required"),
        ("vocabulary.txt", None, "run has neither vocabulary.txt nor tokenizer/"),
        ("vocabulary.txt", "<eos>\nother\n", "was trained with a different vocabulary"),
    ],
)
def test_a_corrupt_run_is_an_error(tmp_path, name, content, message):
    write_run(tmp_path / "run", Config(hidden_size=3), WITH_UNK)
    (tmp_path / "run" / name).unlink()
    if content is not None:
        (tmp_path / "run" / name).write_text(content)
    with pytest.raises(UserError, match=message):
        open_run(tmp_path / "run")
