"""Loading a data directory: accepted and rejected text files."""

import gzip
import logging
import os
import pathlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lm.data.cache
import lm.tokens.text
from lm.config import Config
from lm.data.corpus import load_corpus
from lm.errors import RunError, UserError
from lm.tokens.text import Part, read_blocks
from lm.tokens.tokenizers import read_words
from lm.tokens.vocabulary import EOS, UNK
from tests.commands import run_code
from tests.unit.data.texts import load_obeying_permissions, unknown, words_of, write

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_lines_are_split_on_whitespace_and_end_in_eos(tmp_path, mark):
    corpus = load_corpus(write(tmp_path / "d", valid=mark + "the  cat\t\n\ndog\r\nsat"))
    assert words_of(corpus, "valid") == ["the", "cat", EOS, EOS, "dog", EOS, "sat", EOS]
    assert (corpus.record.kind, corpus.record.path) == ("text", str(tmp_path / "d"))
    assert corpus.tokenizer.tokens == (EOS, "sat", "the", "cat", "dog")
    for split in ("train", "valid", "test"):
        ids = getattr(corpus, split)
        assert ids.dtype == np.int32
        assert isinstance(ids, np.memmap)
        assert not ids.flags.writeable


def test_unknown_words_become_unk_and_are_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lm")
    corpus = load_corpus(write(tmp_path / "d", valid="the cow\n", test="a cow sat\n"))
    assert words_of(corpus, "valid") == ["the", UNK, EOS]
    assert words_of(corpus, "test") == [UNK, UNK, "sat", EOS]
    assert unknown(corpus) == {"train": 0, "valid": 1, "test": 2}
    assert corpus.tokenizer.tokens[-1] == UNK  # the other IDs do not change
    assert "test: 2 unknown words" in caplog.text


def test_a_literal_unk_is_an_ordinary_word(tmp_path):
    corpus = load_corpus(write(tmp_path / "d", train="a <unk> b\n", valid="<unk>\n", test="b\n"))
    assert unknown(corpus) == {"train": 0, "valid": 0, "test": 0}
    assert words_of(corpus, "train") == ["a", UNK, "b", EOS]


def test_vocab_size_keeps_the_most_frequent_words(tmp_path):
    corpus = load_corpus(write(tmp_path / "d"), Config(vocab_size=4))
    assert set(corpus.tokenizer.tokens) == {EOS, UNK, "sat", "the"}
    assert words_of(corpus, "train") == ["the", UNK, "sat", EOS] * 2
    assert unknown(corpus) == {"train": 2, "valid": 1, "test": 1}


def test_the_checksum_depends_on_texts_and_vocabulary(tmp_path):
    corpora = [
        load_corpus(write(tmp_path / "a")),
        load_corpus(write(tmp_path / "b", test="the\n")),
        load_corpus(write(tmp_path / "c"), Config(vocab_size=4)),
    ]
    assert len({corpus.record.sha256 for corpus in corpora}) == 3
    assert load_corpus(write(tmp_path / "other")).record.sha256 == corpora[0].record.sha256


# All kinds of whitespace that str.split() knows, within and between lines.
TEXT = st.text(st.sampled_from("aé漢🙂<> \t\r\n\x0b\x1c\x85\u00a0\u2028"), max_size=60)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, block=st.integers(1, 9))
def test_any_text_survives_encode_and_decode(tmp_path, text, block):
    # Small blocks cut words and characters anywhere.
    path = tmp_path / "text.txt"
    path.write_bytes(("word " + text).encode())
    lines = ("word " + text).split("\n")
    expected = [word for line in lines[:-1] for word in [*line.split(), EOS]]
    expected += [*lines[-1].split(), EOS] if lines[-1] else []
    words = [
        word
        for words in read_words(read_blocks([Part(str(path))], "reading", block))
        for word in words
    ]
    assert words == expected


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("text", [b"", b"\n \n\t\n"])
def test_an_empty_split_is_rejected_with_file_and_line(tmp_path, split, text):
    data_path = write(tmp_path / "d", **{split: text})
    with pytest.raises(UserError, match=rf"{split}\.txt, line {1 + text.count(10)}: .*word"):
        load_corpus(data_path)


@pytest.mark.parametrize("block", [1 << 18, 3])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"the cat\nsat\na caf\xe9 here\n", "line 3: byte 0xe9"),
        (b"the\ncat \xe6\xbc", "line 2: byte 0xe6"),  # the file ends within a character
    ],
)
def test_invalid_utf8_is_rejected_with_file_and_line(tmp_path, block, text, message):
    path = tmp_path / "valid.txt"
    path.write_bytes(text)
    with pytest.raises(UserError, match=rf"valid\.txt, {message}"):
        list(read_words(read_blocks([Part(str(path))], "reading", block)))


def test_a_file_without_whitespace_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"train\.txt, line 1: .*text file"):
        load_corpus(write(tmp_path / "d", train=b"x" * 2_000_000))


def test_words_may_be_separated_by_tabs_only(tmp_path):
    corpus = load_corpus(write(tmp_path / "d", train="a\tbb\t" * 300_000))
    assert len(corpus.train) == 600_001


def test_a_text_that_is_unreadable_for_a_moment_is_not_a_user_error(tmp_path):
    data_path = write(tmp_path / "d")
    (tmp_path / "d/train.txt").unlink()
    (tmp_path / "d/train.txt").symlink_to("/proc/self/mem")  # reading its first byte is an error
    with pytest.raises(RunError, match=r"cannot read .*train\.txt: Input/output error"):
        load_corpus(data_path)
    words = Config(vocabulary=str(tmp_path / "d/train.txt"))
    with pytest.raises(RunError, match=r"cannot read the vocabulary .*: Input/output error"):
        load_corpus(write(tmp_path / "other"), words)


@pytest.mark.parametrize("make", [os.mkdir, lambda p: os.symlink("/nowhere", p)])
def test_a_split_that_is_not_a_file_is_named(tmp_path, make):
    data_path = write(tmp_path / "d")
    os.remove(tmp_path / "d" / "test.txt")
    make(tmp_path / "d" / "test.txt")
    with pytest.raises(UserError, match=r"test\.txt"):
        load_corpus(data_path)


def test_missing_permissions_are_user_errors(tmp_path):
    data_path = write(tmp_path / "d")
    os.chmod(tmp_path / "d" / "valid.txt", 0)
    result = load_obeying_permissions(data_path)
    assert "UserError: cannot read" in result.stderr
    assert "valid.txt: Permission denied" in result.stderr
    (tmp_path / "read-only").mkdir(mode=0o555)
    result = load_obeying_permissions(tmp_path / "read-only")
    assert "UserError: PTB is not in" in result.stderr
    assert "(Permission denied); free some space, or choose a writable directory" in result.stderr


@pytest.mark.parametrize("separator", [pytest.param("\n", marks=pytest.mark.soak), " "])
def test_memory_does_not_grow_with_the_corpus(tmp_path, separator):
    """With all 24 MB of IDs or all words in memory, a process would need 24 to 400 MB more.

    The ranks of a host share the pages of the mapped files, so only other pages count.
    """
    words = np.array([f"word{i}" for i in range(1000)])
    block = separator.join(words[np.random.default_rng(1).integers(0, 1000, 100_000)]) + separator
    data_path = write(tmp_path / "d", train=block * 60)
    code = (
        "import sys, threading\n"
        "from lm.data.batches import TrainBatches, rows_of_rank\n"
        "from lm.data.corpus import load_corpus\n"
        "def memory():\n"
        "    status = dict(line.split(':') for line in open('/proc/self/status'))\n"
        "    return int(status['RssAnon'].split()[0])\n"
        "peak, done = 0, threading.Event()\n"
        "def watch():\n"
        "    global peak\n"
        "    while not done.wait(0.01): peak = max(peak, memory())\n"
        "load_corpus(sys.argv[2]); before = memory()\n"
        "watcher = threading.Thread(target=watch); watcher.start()\n"
        "corpus = load_corpus(sys.argv[1])\n"
        "batches = TrainBatches(corpus.train, 20, 35, rows_of_rank(20, 0, 2))\n"
        "total = sum(int(batches.window(s)[1].sum()) for s in range(batches.steps_per_epoch))\n"
        "done.set(); watcher.join(); print(len(corpus.train), peak - before)"
    )
    result = run_code(code, data_path, write(tmp_path / "small"))
    tokens, kilobytes = map(int, result.stdout.split())
    assert tokens >= 6_000_000
    assert 0 < kilobytes < 16_000 < 4 * tokens / 1024


def compress(data_path, split):
    path = pathlib.Path(data_path, f"{split}.txt")
    path.with_suffix(".txt.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def test_a_compressed_text_is_the_same_corpus(tmp_path, monkeypatch):
    data_path = write(tmp_path / "d", valid="the cow\n")
    plain = load_corpus(data_path)
    compress(data_path, "train")
    compress(data_path, "valid")
    monkeypatch.setattr(lm.data.cache, "encode_corpus", lambda *_: pytest.fail("encoded again"))
    compressed = load_corpus(data_path)
    assert compressed.record == plain.record
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    assert words_of(load_corpus(data_path, Config(vocab_size=4)), "valid") == ["the", UNK, EOS]


@pytest.mark.parametrize("harm", [lambda b: b[:-9], lambda b: b"text\n", lambda b: b[:30] + b[:9]])
def test_an_invalid_compressed_text_is_one_line(tmp_path, harm):
    data_path = write(tmp_path / "d", train="the cat sat on the mat\n" * 99)
    compress(data_path, "train")
    path = tmp_path / "d" / "train.txt.gz"
    path.write_bytes(harm(path.read_bytes()))
    message = r"train\.txt\.gz is not a complete \.gz file \(.*; compress"
    with pytest.raises(UserError, match=message):
        load_corpus(data_path)


@pytest.mark.ptb
def test_ptb_has_its_published_size(ptb_archive, tmp_path, monkeypatch):
    data_path = str(tmp_path / "ptb")
    first = load_corpus(data_path, data_url=ptb_archive)
    assert first.record.kind == "ptb"
    assert len(first.tokenizer) == 10_000
    assert first.tokenizer.tokens[:4] == ("the", UNK, EOS, "N")
    sizes = {"train": 929_589, "valid": 73_760, "test": 82_430}
    assert {split: len(getattr(first, split)) for split in sizes} == sizes
    assert not any(unknown(first).values())
    lines = (tmp_path / "ptb" / "ptb.valid.txt").read_text().splitlines()
    assert words_of(first, "valid") == [w for line in lines for w in [*line.split(), EOS]]
    encode = "lm.data.cache.encode_corpus"
    monkeypatch.setattr(encode, lambda *_: pytest.fail("the corpus is encoded again"))
    assert load_corpus(data_path).record == first.record
