"""The location of a run's corpus."""

import contextlib
import gzip
import logging
import re
import shutil

import pytest
import tokenizers

from lm.config import Config, RunOptions
from lm.data.corpus import load_corpus, load_corpus_to_train
from lm.data.location import find_data_path
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Supervisor
from lm.errors import RunError, UserError
from lm.inference.evaluation import load_text
from lm.inference.trained_run import open_run
from lm.record import CorpusRecord, RunRecord
from lm.training.prepare import prepare
from tests.commands import parse_flags
from tests.unit.data.texts import decoded, write
from tests.untrained import make_run


@pytest.fixture
def own_text(tmp_path):
    """A directory with the user's own text, which does not need <unk>."""
    write(tmp_path / "own", **dict.fromkeys(("train", "valid", "test"), "a b c d\n" * 300))
    return tmp_path / "own"


def write_record(directory, kind, data_path):
    directory.mkdir()
    record = RunRecord({}, "", CorpusRecord(kind, str(data_path), "0" * 64))
    record.write(str(directory), has_checkpoints=False)
    return record.corpus


def test_the_first_recorded_directory_is_used(tmp_path, own_text):
    write_record(tmp_path / "run", "text", own_text)
    assert find_data_path("files", [tmp_path / "none", tmp_path / "run"]) == str(own_text)
    assert find_data_path("files", [tmp_path / "none"]) == "data"
    assert find_data_path("embedded", [tmp_path / "run"]) == "data"


@pytest.mark.parametrize("kind", ["text", "ptb"])
def test_a_missing_corpus_is_one_line_with_the_flag(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "run", kind, tmp_path / "moved")
    with pytest.raises(
        UserError, match=r"is not in .*/moved; .* with --data_path; to evaluate .* with --split$"
    ):
        find_data_path("files", ["run"])
    # The default directory of a project that was moved as a whole contains the corpus.
    write(tmp_path / "data", prefix="ptb." if kind == "ptb" else "")
    assert find_data_path("files", ["run"]) == "data"


def test_an_invalid_directory_counts_as_a_missing_corpus(tmp_path, monkeypatch):
    """For example, the recorded directory may be in another user's private home directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").symlink_to(tmp_path / "home")
    write_record(tmp_path / "run", "embedded", tmp_path / "home/data")
    assert find_data_path("embedded", ["run"]) == "data"


def test_a_text_that_the_config_ignores_is_an_error(tmp_path, own_text, corpora):
    """Search finds its corpus in the same way as training."""
    config = Config(corpus="embedded")
    message = f"{own_text} contains test.txt, train.txt, valid.txt, .* --corpus files"
    with pytest.raises(UserError, match=message):
        load_corpus_to_train(config, RunOptions(data_path=str(own_text)))
    assert not (own_text / "embedded").exists()
    make_run(tmp_path / "run", corpora)
    with pytest.raises(UserError, match=message):
        load_text(open_run(tmp_path / "run"), "valid", str(own_text))
    with pytest.raises(UserError, match=r"train.txt contains a text, .* --corpus files"):
        find_data_path("embedded", [], str(own_text / "train.txt"))
    (tmp_path / "divided/train").mkdir(parents=True)
    with pytest.raises(UserError, match=r"divided contains train, .* --corpus files"):
        find_data_path("embedded", [], str(tmp_path / "divided"))
    write(tmp_path / "ptb", prefix="ptb.")
    assert find_data_path("embedded", [], str(tmp_path / "ptb")) == str(tmp_path / "ptb")


def test_the_perplexity_of_a_perfect_model_is_known_only_for_the_whole_vocabulary(corpora):
    whole = Config(corpus="embedded")
    assert load_corpus(str(corpora), whole).known_perplexity.test_perplexity > 1
    limited = Config(corpus="embedded", vocab_size=5)
    assert load_corpus(str(corpora), limited).known_perplexity is None


def test_a_corpus_that_can_be_created_again_needs_no_flag(tmp_path, monkeypatch):
    """A job that resumes in a new container downloads PTB, as the first job did."""
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "default", "ptb", tmp_path / "data")
    assert find_data_path("files", ["default"]) == "data"
    write_record(tmp_path / "embedded", "embedded", tmp_path / "missing")
    assert find_data_path("embedded", ["embedded"]) == "data"


def prepared(*flags):
    arguments = ["lm.train", "--config", "config_test", "--corpus", "files", *map(str, flags)]
    config, options, functions = parse_flags(arguments)
    with contextlib.ExitStack() as stack, Supervisor(Communicator(), 0) as supervisor:
        return prepare(config, options, Communicator(), stack, functions, supervisor)


def test_training_finds_the_corpus_of_the_run_that_it_continues(tmp_path, own_text):
    recorded = write_record(tmp_path / "run", "text", own_text)
    make_run(tmp_path / "earlier", own_text, corpus="files")
    checkpoint = tmp_path / "earlier/checkpoints/step-00000007/"
    for flags in (
        ["--resume", "--output_dir", tmp_path / "run"],
        ["--init_from", checkpoint, "--output_dir", tmp_path / "next"],
    ):
        corpus = prepared(*flags).corpus
        assert (corpus.record.kind, corpus.record.path) == (recorded.kind, recorded.path)


def test_a_run_uses_the_vocabulary_of_the_run_that_it_starts_from(tmp_path, own_text, caplog):
    caplog.set_level(logging.INFO, "lm")
    make_run(tmp_path / "run", own_text, corpus="files", vocab_size=4)
    earlier = open_run(tmp_path / "run").tokenizer
    other = write(tmp_path / "other", train="x a y\n" * 300)
    flags = ["--init_from", tmp_path / "run", "--data_path", other, "--output_dir", tmp_path / "a"]
    corpus = prepared(*flags).corpus
    assert corpus.tokenizer.sha256 == earlier.sha256
    assert f"using the tokenizer of {tmp_path / 'run'}\n" in caplog.text
    assert "train: 600 unknown words became <unk>" in caplog.text
    corpus = prepared(*flags[:-1], tmp_path / "b", "--new_vocabulary").corpus
    assert {"x", "y", "a"} < {*corpus.tokenizer.tokens}
    for flag in (["--tokenizer", "bytes"], ["--vocab_size", 5]):
        with pytest.raises(UserError, match=f"differs from {flag[0][2:]} {flag[1]}: remove"):
            prepared(*flags, *flag)


def test_a_resumed_run_keeps_its_tokenizer_without_the_original(tmp_path, own_text, monkeypatch):
    """The tokenizer of a run is in its directory."""
    words = tmp_path / "words.txt"
    words.write_text("<eos>\n<unk>\na\n")
    flags = ["--data_path", own_text, "--output_dir", tmp_path / "run", "--vocabulary", words]
    first = prepared(*flags)
    first.corpus.tokenizer.save(str(tmp_path / "run"))
    first.record.write(str(tmp_path / "run"), has_checkpoints=False)
    assert first.corpus.tokenizer.tokens == ("<eos>", "<unk>", "a")
    words.unlink()
    assert prepared(*flags, "--resume").record.facts == first.record.facts
    monkeypatch.chdir(tmp_path)
    (tmp_path / "characters").mkdir()  # not the tokenizer of this name
    with pytest.raises(UserError, match="differs from tokenizer characters: remove"):
        prepared(*flags[:-2], "--resume", "--tokenizer", "characters")
    words.write_text("<eos>\n<unk>\nb\n")
    with pytest.raises(UserError, match=r"words.txt has changed since the start of .*: restore or"):
        prepared(*flags, "--resume")


def test_a_tokenizer_may_move(tmp_path, own_text):
    """Hosts may have different paths, and a run may be resumed after a move."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train(str(own_text / "train.txt"), special_tokens=["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "a.json"))
    shutil.copy(tmp_path / "a.json", tmp_path / "b.json")
    flags = ["--data_path", own_text, "--output_dir", tmp_path / "run", "--tokenizer"]
    first, moved = (prepared(*flags, tmp_path / f"{name}.json").record for name in "ab")
    assert first.config["tokenizer"] != moved.config["tokenizer"] and first.facts == moved.facts


def test_the_tokenizer_of_a_run_is_recorded_by_its_absolute_path(tmp_path, own_text, monkeypatch):
    """A run may resume in a different working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("<eos>\n<unk>\na\n")
    flags = ["--data_path", own_text, "--output_dir", tmp_path / "run"]
    config = prepared(*flags, "--vocabulary", "words.txt").config
    assert (config.tokenizer, config.vocabulary) == ("words", str(tmp_path / "words.txt"))
    message = f"the tokenizer {tmp_path}/my.json does not exist"
    with pytest.raises(UserError, match=re.escape(message)):
        prepared(*flags, "--tokenizer", "my.json")


def test_a_part_of_ptb_is_not_the_corpus_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "run", "ptb", tmp_path / "moved")
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/ptb.train.txt").touch()
    with pytest.raises(UserError, match=r"is not in .*/moved; mount its disk"):
        find_data_path("files", ["run"])


def test_an_adaptive_softmax_needs_ids_that_are_sorted_by_frequency(tmp_path, own_text):
    flags = ["--data_path", own_text, "--output_dir", tmp_path / "run", "--tokenizer", "bytes"]
    with pytest.raises(UserError, match=r"adaptive_softmax_cutoffs needs .* sorted by frequency"):
        prepared(*flags, "--adaptive_softmax_cutoffs", "50,100")


def test_a_resumed_run_does_not_replace_an_unmounted_text(tmp_path, own_text):
    """PTB must not be downloaded instead, and the exit code must allow a restart."""
    make_run(tmp_path / "run", own_text, corpus="files")
    own_text.rename(tmp_path / "moved")
    flags = ["--resume", "--output_dir", tmp_path / "run"]
    for data_path, message in (([], "is not in"), (["--data_path", own_text], "mount its disk")):
        with pytest.raises(RunError, match=message) as raised:
            prepared(*flags, *data_path)
        assert not isinstance(raised.value, UserError)
    assert not own_text.exists()


@pytest.mark.parametrize("kind", ["text", "ptb"])
def test_a_resumed_run_waits_for_an_unmounted_target_of_a_link(tmp_path, kind):
    """The exit code must allow a restart."""
    prefix = "ptb." if kind == "ptb" else ""
    data_path = write(tmp_path / "data", prefix=prefix)
    write_record(tmp_path / "run", kind, data_path)
    link = tmp_path / f"data/{prefix}valid.txt"
    link.unlink()
    link.symlink_to("/not/mounted/valid.txt")
    options = RunOptions(output_dir=str(tmp_path / "run"), resume=True)
    with pytest.raises(RunError, match=f"{link} is a broken symlink; mount its target$"):
        load_corpus_to_train(Config(), options)


def test_an_evaluation_of_a_given_corpus_does_not_need_the_other_splits(tmp_path, own_text):
    make_run(tmp_path / "run", own_text, corpus="files")
    (own_text / "train.txt").unlink()
    (own_text / "train.txt").symlink_to("/not/mounted/train.txt")
    run = open_run(tmp_path / "run")
    assert len(load_text(run, "test", str(own_text)).ids) == 5 * 300
    with pytest.raises(UserError, match=r"/train\.txt"):  # the corpus of the run may have changed
        load_text(run, "test")


def test_a_split_is_loaded_from_the_recorded_directory(tmp_path, own_text):
    make_run(tmp_path / "run", own_text, corpus="files")
    run = open_run(tmp_path / "run")
    expected = load_text(run, "valid").ids.tolist()
    assert len(expected) == 5 * 300
    write(tmp_path / "ptb", prefix="ptb.")
    message = f"the corpus of .* is not in {tmp_path}/ptb; .* to lm.evaluate with --split"
    with pytest.raises(UserError, match=message):
        load_text(run, "valid", str(tmp_path / "ptb"))
    own_text.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="--data_path"):
        load_text(run, "valid")
    assert load_text(run, "valid", str(tmp_path / "moved")).ids.tolist() == expected
    # The text is not the corpus of the run. It is read with the vocabulary of the run.
    (tmp_path / "moved/train.txt").write_text("d d d c c b a\n" * 300)
    (tmp_path / "moved/valid.txt").write_text("d c b a\n")
    (tmp_path / "moved").rename(own_text)
    fix = re.escape(f"--data_path {own_text}")
    with pytest.raises(UserError, match=f"changed since .* {fix}$"):
        load_text(run, "valid")
    changed = load_text(run, "valid", str(own_text))
    assert decoded(run.tokenizer, changed.ids) == ["d", "c", "b", "a", "<eos>"]


def test_an_evaluation_uses_the_limits_of_the_run(tmp_path):
    texts = {"train": "a b c\na b\n", "valid": "a c\n"}
    data_path = write(tmp_path / "own", **texts, test="c b\n")
    make_run(tmp_path / "run", data_path, corpus="files", min_count=2)
    run = open_run(tmp_path / "run")
    (tmp_path / "other.txt.gz").write_bytes(gzip.compress(b"c a\n"))
    for split, words in (
        ("valid", ["a", "<unk>", "<eos>"]),
        ("test", ["<unk>", "b", "<eos>"]),
        (str(tmp_path / "other.txt.gz"), ["<unk>", "a", "<eos>"]),
    ):
        text = load_text(run, split)
        assert decoded(run.tokenizer, text.ids) == words
        assert text.encoded.unknown == 1


def test_a_recorded_path_never_decides_where_the_embedded_corpus_is_written(tmp_path, monkeypatch):
    """The run may come from somebody else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").mkdir()
    corpus = CorpusRecord("embedded", str(tmp_path / "victim"), "")
    RunRecord({}, "", corpus).write(str(tmp_path), has_checkpoints=False)
    assert find_data_path("embedded", [str(tmp_path)]) == "data"
    (tmp_path / "victim/embedded").mkdir()
    write(tmp_path / "victim/embedded", **dict.fromkeys(("train", "valid", "test"), "a\n"))
    assert find_data_path("embedded", [str(tmp_path)]) == str(tmp_path / "victim")
