"""Where a run's corpus is looked for, and what a run remembers of it."""

import contextlib
import dataclasses

import pytest

from lm.cli.flags import parse_training_flags
from lm.config import Config
from lm.data.run_corpus import find_data_path, load_run_corpus
from lm.distributed.communicator import OneProcess
from lm.errors import RunError, UserError
from lm.inference.run import open_run
from lm.inference.texts import load_text
from lm.record import CorpusRecord, RunRecord
from lm.training.prepare import prepare
from tests.unit.data.texts import decoded
from tests.untrained import make_run

OWN = Config(corpus="files")


@pytest.fixture
def own_text(tmp_path):
    """A directory with a text of the user's own, which needs no <unk>."""
    (tmp_path / "own").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / f"own/{split}.txt").write_text("a b c d\n" * 300)
    return tmp_path / "own"


def remember(directory, kind, data_path):
    directory.mkdir()
    record = RunRecord({}, "", CorpusRecord(kind, str(data_path), "0" * 64))
    record.write(str(directory), has_checkpoints=False)
    return record.corpus


def test_the_corpus_is_where_the_first_run_that_remembers_it_says(tmp_path, own_text):
    remember(tmp_path / "run", "text", own_text)
    assert find_data_path(OWN, [tmp_path / "none", tmp_path / "run"]) == str(own_text)
    assert find_data_path(OWN, [tmp_path / "none"]) == "data"
    assert find_data_path(Config(corpus="embedded"), [tmp_path / "run"]) == "data"


@pytest.mark.parametrize("kind", ["text", "ptb"])
def test_a_corpus_that_is_gone_is_one_line_with_the_flag(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    remember(tmp_path / "run", kind, tmp_path / "gone")
    with pytest.raises(UserError, match=r"is not in .*/gone any more: .* with --data_path$"):
        find_data_path(OWN, ["run"])
    # A project that was moved has it in its own default directory.
    (tmp_path / "data").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / f"data/{'ptb.' * (kind == 'ptb')}{split}.txt").write_text("a\n")
    assert find_data_path(OWN, ["run"]) == "data"


def test_a_directory_that_leads_nowhere_is_one_without_the_corpus(tmp_path, monkeypatch):
    """As one that is closed, such as the home of who has trained a run that was copied."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").symlink_to(tmp_path / "home")
    remember(tmp_path / "run", "embedded", tmp_path / "home/data")
    assert find_data_path(Config(corpus="embedded"), ["run"]) == "data"


def test_a_perfect_models_perplexity_is_told_of_its_own_words_only(corpora):
    assert load_run_corpus(Config(corpus="embedded"), str(corpora))[1].test_perplexity > 1
    assert load_run_corpus(Config(corpus="embedded", vocab_size=5), str(corpora))[1] is None


def test_what_can_be_made_again_needs_no_flag(tmp_path, monkeypatch):
    """A job that is resumed in a fresh container downloads PTB as the first one did."""
    monkeypatch.chdir(tmp_path)
    remember(tmp_path / "default", "ptb", tmp_path / "data")
    assert find_data_path(OWN, ["default"]) == "data"
    remember(tmp_path / "embedded", "embedded", tmp_path / "gone")
    assert find_data_path(Config(corpus="embedded"), ["embedded"]) == "data"


def test_training_on_finds_the_corpus_of_the_run_that_it_goes_on_from(tmp_path, own_text):
    record = remember(tmp_path / "run", "text", own_text)
    arguments = ["lm.train", "--config", "config_test", "--corpus", "files"]
    for flags in (
        ["--resume", "--output_dir", tmp_path / "run"],
        ["--init_from", tmp_path / "run/checkpoints/step-1/", "--output_dir", tmp_path / "next"],
    ):
        config, options, functions = parse_training_flags([*arguments, *map(str, flags)])
        with contextlib.ExitStack() as stack:
            run = prepare(config, options, OneProcess(), stack, functions)
        assert run.record.corpus == dataclasses.replace(record, sha256=run.corpus.checksum)


def test_a_text_that_is_out_of_sight_is_waited_for(tmp_path, own_text):
    """Such as on a node whose disk is not mounted: PTB must not come in its place."""
    make_run(tmp_path / "run", own_text, corpus="files")
    own_text.rename(tmp_path / "moved")
    flags = ["--corpus", "files", "--resume", "--output_dir", tmp_path / "run"]
    flags = ["lm.train", "--config", "config_test", *map(str, flags), "--data_path", str(own_text)]
    config, options, functions = parse_training_flags(flags)
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(RunError, match="own: mount what") as raised,
    ):
        prepare(config, options, OneProcess(), stack, functions)
    assert not isinstance(raised.value, UserError)  # which no job tries again after
    assert not own_text.exists()
    config, options, functions = parse_training_flags(flags[:-2])  # without --data_path
    with contextlib.ExitStack() as stack, pytest.raises(RunError, match="any more") as raised:
        prepare(config, options, OneProcess(), stack, functions)
    assert not isinstance(raised.value, UserError)


def test_a_split_is_read_from_where_the_run_was_trained(tmp_path, own_text):
    make_run(tmp_path / "run", own_text, corpus="files")
    run = open_run(tmp_path / "run")
    expected = load_text(run, "valid").ids.tolist()
    assert len(expected) == 5 * 300
    own_text.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="--data_path"):
        load_text(run, "valid")
    assert load_text(run, "valid", str(tmp_path / "moved")).ids.tolist() == expected
    # The same words, another text: a number for it would pass for one of the run's corpus.
    (tmp_path / "moved/valid.txt").write_text("d c b a\n")
    (tmp_path / "moved").rename(own_text)
    with pytest.raises(UserError, match=f"changed since .* --data_path {own_text}$"):
        load_text(run, "valid")
    changed = load_text(run, "valid", str(own_text))  # told so
    assert decoded(run.vocabulary, changed.ids) == ["d", "c", "b", "a", "<eos>"]
