"""Reading a data directory: what is found, what is refused, what is cached."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import json
import logging
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lm.data.cache
import lm.data.corpus
import lm.data.encoding
from lm.data.corpus import load_corpus
from lm.data.vocabulary import EOS, UNK
from lm.errors import RunError, UserError
from lm.files import locked

pytestmark = pytest.mark.timeout(60)

ROOT = pathlib.Path(__file__).parents[3]
TEXTS = {"train": "the cat sat\nthe dog sat\n", "valid": "the cat\n", "test": "dog sat\n"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture
def encodings(monkeypatch):
    """The directories into which a corpus was encoded."""
    done = []

    def spy(*arguments):
        done.append(arguments[-1])
        return lm.data.encoding.encode_corpus(*arguments)

    monkeypatch.setattr(lm.data.cache, "encode_corpus", spy)
    return done


def write(directory, prefix="", **texts) -> str:
    """Write splits as text or bytes; those not given get small defaults."""
    os.makedirs(directory, exist_ok=True)
    for split, text in {**TEXTS, **texts}.items():
        content = text if isinstance(text, bytes) else text.encode()
        (pathlib.Path(directory) / f"{prefix}{split}.txt").write_bytes(content)
    return str(directory)


def words_of(corpus, split) -> list:
    return corpus.vocabulary.decode(getattr(corpus, split))


def test_each_line_is_split_on_white_space_and_ends_in_eos(tmp_path):
    corpus = load_corpus(write(tmp_path / "d", valid="the  cat\t\n\ndog\r\nsat"))
    assert words_of(corpus, "valid") == ["the", "cat", EOS, EOS, "dog", EOS, "sat", EOS]
    assert corpus.name == "text"
    assert corpus.vocabulary.words == (EOS, "sat", "the", "cat", "dog")
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
    assert corpus.num_unknown == {"train": 0, "valid": 1, "test": 2}
    assert corpus.vocabulary.words[-1] == UNK  # the other ids are as without it
    assert "test: 2 of 4 tokens" in caplog.text


def test_a_literal_unk_is_an_ordinary_word(tmp_path):
    corpus = load_corpus(write(tmp_path / "d", train="a <unk> b\n", valid="<unk>\n", test="b\n"))
    assert corpus.num_unknown == {"train": 0, "valid": 0, "test": 0}
    assert words_of(corpus, "train") == ["a", UNK, "b", EOS]


def test_vocab_size_keeps_the_most_frequent_words(tmp_path):
    corpus = load_corpus(write(tmp_path / "d"), vocab_size=4)
    assert set(corpus.vocabulary.words) == {EOS, UNK, "sat", "the"}
    assert words_of(corpus, "train") == ["the", UNK, "sat", EOS] * 2
    assert corpus.num_unknown == {"train": 2, "valid": 1, "test": 1}


def test_the_checksum_tells_texts_and_vocabularies_apart(tmp_path):
    corpora = [
        load_corpus(write(tmp_path / "a")),
        load_corpus(write(tmp_path / "b", test="the\n")),
        load_corpus(write(tmp_path / "c"), vocab_size=4),
    ]
    assert len({corpus.checksum for corpus in corpora}) == 3
    assert load_corpus(write(tmp_path / "other")).checksum == corpora[0].checksum


# White space of every kind that str.split() knows, within and between lines.
TEXT = st.text(st.sampled_from("aé漢🙂<> \t\r\n\x0b\x1c\x85\u00a0\u2028"), max_size=60)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, block=st.integers(1, 9))
def test_any_text_survives_encode_and_decode(tmp_path, monkeypatch, text, block):
    monkeypatch.setattr(
        lm.data.encoding, "_BLOCK_BYTES", block
    )  # cut words and characters anywhere
    path = tmp_path / "text.txt"
    path.write_bytes(("word " + text).encode())
    lines = ("word " + text).split("\n")
    expected = [word for line in lines[:-1] for word in [*line.split(), EOS]]
    expected += [*lines[-1].split(), EOS] if lines[-1] else []
    words = [word for words in lm.data.encoding.read_words(str(path)) for word in words]
    assert words == expected


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path):
    corpus = load_corpus(write(tmp_path / "d", valid=b"\xef\xbb\xbfthe cat\n"))
    assert words_of(corpus, "valid") == ["the", "cat", EOS]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("text", [b"", b"\n \n\t\n"])
def test_an_empty_split_is_refused_by_file_and_line(tmp_path, split, text):
    data_path = write(tmp_path / "d", **{split: text})
    with pytest.raises(UserError, match=rf"{split}\.txt, line {1 + text.count(10)}: .*word"):
        load_corpus(data_path)


@pytest.mark.parametrize("block", [1 << 18, 3])
def test_bytes_that_are_not_utf8_are_refused_by_file_and_line(tmp_path, monkeypatch, block):
    monkeypatch.setattr(lm.data.encoding, "_BLOCK_BYTES", block)
    data_path = write(tmp_path / "d", valid=b"the cat\nsat\n" + b"a caf\xe9 here\n")
    with pytest.raises(UserError, match=r"valid\.txt, line 3: byte 0xe9"):
        load_corpus(data_path)


def test_a_character_cut_off_by_the_end_of_the_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"test\.txt, line 2"):
        load_corpus(write(tmp_path / "d", test=b"the\ncat \xe6\xbc"))


def test_a_file_without_white_space_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"train\.txt, line 1: .*text file"):
        load_corpus(write(tmp_path / "d", train=bytes(2_000_000)))


def test_a_missing_split_is_named(tmp_path):
    data_path = write(tmp_path / "d")
    os.remove(tmp_path / "d" / "valid.txt")
    with pytest.raises(UserError, match=r"not valid\.txt"):
        load_corpus(data_path)


def test_two_corpora_in_a_directory_are_refused(tmp_path):
    data_path = write(tmp_path / "d")
    write(data_path, prefix="ptb.")
    with pytest.raises(UserError, match=r"both.*train\.txt.*ptb\.train\.txt"):
        load_corpus(data_path)


def test_ptb_files_of_another_kind_are_accepted_with_a_warning(tmp_path, caplog):
    corpus = load_corpus(write(tmp_path / "d", prefix="ptb."))
    assert corpus.name == "ptb"
    assert "ptb.train.txt" in caplog.text
    assert "not the published PTB" in caplog.text


def test_an_incomplete_set_of_other_ptb_files_is_not_completed(tmp_path):
    data_path = write(tmp_path / "d", prefix="ptb.")
    os.remove(tmp_path / "d" / "ptb.test.txt")
    with pytest.raises(UserError, match=r"lacks ptb\.test\.txt, and its ptb\.train\.txt"):
        load_corpus(data_path)
    assert (tmp_path / "d" / "ptb.train.txt").read_text() == TEXTS["train"]


def test_a_data_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot read the data directory .*file.*--data_path"):
        load_corpus(str(tmp_path / "file"))


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda p: os.symlink("/nowhere", p)])
def test_a_split_that_is_no_file_is_refused_by_name(tmp_path, make):
    data_path = write(tmp_path / "d")
    os.remove(tmp_path / "d" / "test.txt")
    make(tmp_path / "d" / "test.txt")
    with pytest.raises(UserError, match=r"test\.txt"):
        load_corpus(data_path)


def load_obeying_permissions(data_path, **env: str) -> subprocess.CompletedProcess:
    """Load a corpus in a process that permission bits stop, which they do not for root."""

    def drop_privileges():
        if os.getuid() == 0:
            for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
                assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP

    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
        "from lm.data.corpus import load_corpus; print(load_corpus(sys.argv[1]).train.filename)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(data_path)],
        cwd=ROOT,
        env={**os.environ, **env},
        preexec_fn=drop_privileges,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_text_without_read_permission_is_refused_by_name(tmp_path):
    data_path = write(tmp_path / "d")
    os.chmod(tmp_path / "d" / "valid.txt", 0)
    result = load_obeying_permissions(data_path)
    assert "UserError: cannot read" in result.stderr
    assert "valid.txt: Permission denied" in result.stderr


def test_a_directory_without_write_permission_cannot_take_ptb(tmp_path):
    (tmp_path / "d").mkdir(mode=0o555)
    result = load_obeying_permissions(tmp_path / "d")
    assert "UserError: PTB is not in" in result.stderr
    assert "Permission denied; choose a writable directory" in result.stderr


def test_a_read_only_directory_has_its_cache_elsewhere(tmp_path):
    data_path = write(tmp_path / "d")
    os.chmod(data_path, 0o555)
    result = load_obeying_permissions(data_path)
    assert result.stdout.startswith(str(tmp_path / "user-cache" / "lm-corpus")), result.stderr
    assert f"cannot be kept in {data_path}" in result.stderr
    assert "building" not in load_obeying_permissions(data_path).stderr


def test_without_a_user_cache_either_a_temporary_directory_serves(tmp_path):
    data_path = write(tmp_path / "d")
    for read_only in (data_path, tmp_path / "user-cache"):
        os.makedirs(read_only, exist_ok=True)
        os.chmod(read_only, 0o555)
    (tmp_path / "temporary").mkdir()
    result = load_obeying_permissions(data_path, TMPDIR=str(tmp_path / "temporary"))
    assert result.stdout.startswith(str(tmp_path / "temporary" / "lm-corpus-")), result.stderr


def test_no_place_for_the_cache_is_one_clear_error(tmp_path, monkeypatch):
    data_path = write(tmp_path / "d")
    (tmp_path / "file").write_text("no directory")
    places = [str(tmp_path / "file" / "cache"), "/proc/nothing"]
    monkeypatch.setattr(lm.data.corpus, "cache_directories", lambda _: places)
    with pytest.raises(RunError, match=r"file/cache: Not a directory; /proc/nothing: .*XDG_CACHE"):
        load_corpus(data_path)


def test_a_temporary_directory_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    planted = tmp_path / f"lm-corpus-{os.getuid()}"
    planted.mkdir()
    assert str(planted) in lm.data.cache.cache_directories("d")[-1]
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    planted.rename(tmp_path / "lm-corpus-12345")
    assert "lm-corpus-12345" not in lm.data.cache.cache_directories("d")[-1]


def test_the_second_start_encodes_nothing(tmp_path, encodings):
    data_path = write(tmp_path / "d", valid="cow\n")
    first, second = load_corpus(data_path), load_corpus(data_path)
    assert len(encodings) == 1
    assert second.checksum == first.checksum
    assert second.num_unknown == first.num_unknown
    assert np.array_equal(second.train, first.train)
    load_corpus(data_path, vocab_size=3)
    assert len(encodings) == 2


def test_a_changed_file_is_encoded_again(tmp_path, encodings):
    data_path = write(tmp_path / "d")
    load_corpus(data_path)
    before = os.stat(tmp_path / "d" / "test.txt")
    write(data_path, test="dog the\n")  # as long as before
    os.utime(tmp_path / "d" / "test.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert words_of(load_corpus(data_path), "test") == ["dog", "the", EOS]
    assert len(encodings) == 2


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(4)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, flip, os.remove, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["train.ids", "vocabulary.txt", "entry.json"])
def test_a_damaged_cache_is_made_again(tmp_path, encodings, harm, name):
    data_path = write(tmp_path / "d")
    first = load_corpus(data_path)
    words = words_of(first, "train")
    [path] = (tmp_path / "d" / ".cache").glob(f"*/{name}")
    harm(path)
    assert words_of(load_corpus(data_path), "train") == words
    assert len(encodings) == 2
    load_corpus(data_path)
    assert len(encodings) == 2


def test_what_a_faster_host_has_made_stays(tmp_path, monkeypatch):
    """Where locks do not reach other hosts, it trains from it already."""
    data_path = write(tmp_path / "d")
    made, encode = [], lm.data.cache.encode_corpus

    def encode_slowly(*arguments):
        monkeypatch.setattr(lm.data.cache, "encode_corpus", encode)
        monkeypatch.setattr(lm.data.cache, "locked", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(lm.data.cache, "private_name", lambda name: f"{name}-other-host")
        load_corpus(data_path)
        made.extend(path.stat().st_ino for path in (tmp_path / "d/.cache").glob("*/train.ids"))
        return encode(*arguments)

    monkeypatch.setattr(lm.data.cache, "encode_corpus", encode_slowly)
    load_corpus(data_path)
    [ids] = (tmp_path / "d/.cache").glob("*/train.ids")
    assert made == [ids.stat().st_ino]


def test_what_a_killed_process_left_is_cleared(tmp_path):
    data_path = write(tmp_path / "d")
    left = pathlib.Path(lm.data.cache.private_name(f"{data_path}/.cache/encoding"))
    left.mkdir(parents=True)
    (left / "train.ids").write_bytes(b"half")
    load_corpus(data_path)
    assert not left.exists()


def test_a_file_that_changes_while_it_is_encoded_is_an_error(tmp_path, monkeypatch):
    data_path = write(tmp_path / "d")

    def encode(*arguments):
        write(data_path, train="something else entirely\n")
        return lm.data.encoding.encode_corpus(*arguments)

    monkeypatch.setattr(lm.data.cache, "encode_corpus", encode)
    with pytest.raises(RunError, match=r"train\.txt changed"):
        load_corpus(data_path)
    assert not list((tmp_path / "d" / ".cache").glob("v1-*"))


def test_many_processes_encode_once(tmp_path):
    data_path = write(tmp_path / "d", train="a b c d e f g\n" * 20_000)
    code = (
        "import sys, logging; logging.basicConfig(level=logging.INFO)\n"
        "from lm.data.corpus import load_corpus; print(load_corpus(sys.argv[1]).checksum)"
    )
    command = [sys.executable, "-c", code, data_path]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) for _ in range(6)]
    outputs = [rank.communicate(timeout=40) for rank in ranks]
    assert len({out for out, _ in outputs}) == 1
    assert outputs[0][0].strip()
    assert sum("building the vocabulary" in err for _, err in outputs) == 1


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that were hashed, however small, once their checksums are remembered."""
    names = []

    def spy(path):
        names.append(os.path.basename(path))
        return lm.files.sha256_of(path)

    monkeypatch.setattr(lm.data.cache, "ALWAYS_HASHED_BYTES", 0)
    monkeypatch.setattr(lm.data.cache, "sha256_of", spy)
    return names


def test_checksums_of_large_unchanged_files_are_remembered(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(lm.data.cache, "_CLOCK_TICK_NS", 0)
    data_path = write(tmp_path / "d")
    load_corpus(data_path)
    hashed.clear()
    load_corpus(data_path)
    assert hashed == []
    before = os.stat(tmp_path / "d" / "test.txt")
    (tmp_path / "d" / "test.txt").write_text("dog the\n")
    os.utime(tmp_path / "d" / "test.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert words_of(load_corpus(data_path), "test") == ["dog", "the", EOS]
    assert hashed[0] == "test.txt"
    for memo in (tmp_path / "d" / ".cache").glob("checksum-*.json"):
        memo.write_bytes(b"[damaged")
    load_corpus(data_path)


def test_a_wrong_remembered_checksum_stands_in_the_way_once_at_most(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(lm.data.cache, "_CLOCK_TICK_NS", 0)
    data_path = write(tmp_path / "d")
    load_corpus(data_path)
    for memo in (tmp_path / "d" / ".cache").glob("checksum-*.json"):
        content = json.loads(memo.read_text())
        memo.write_text(json.dumps({**content, "sha256": "0" * 64}))
    with pytest.raises(RunError, match="changed while it was being read; start again"):
        load_corpus(data_path)
    assert words_of(load_corpus(data_path), "test") == ["dog", "sat", EOS]


def test_the_checksum_of_a_file_that_has_just_changed_is_not_remembered(tmp_path, hashed):
    data_path = write(tmp_path / "d")
    load_corpus(data_path)
    hashed.clear()
    load_corpus(data_path)
    assert "train.txt" in hashed


@pytest.mark.parametrize("separator", ["\n", " "], ids=["lines", "one-line"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, separator):
    """24 MB of ids; a process that held them, or their words, would need 24 to 400 MB more."""
    words = np.array([f"word{i}" for i in range(1000)])
    block = separator.join(words[np.random.default_rng(1).integers(0, 1000, 100_000)]) + separator
    data_path = write(tmp_path / "d", train=block * 30)
    code = (
        "import resource, sys; from lm.data.corpus import load_corpus\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "load_corpus(sys.argv[2]); before = peak()\n"
        "corpus = load_corpus(sys.argv[1]); print(len(corpus.train), peak() - before)"
    )
    command = [sys.executable, "-c", code, data_path, write(tmp_path / "small")]
    result = subprocess.run(command, cwd=ROOT, stdout=-1, text=True, timeout=50, check=True)
    tokens, kilobytes = map(int, result.stdout.split())
    assert tokens >= 3_000_000
    assert kilobytes < 10_000 < 4 * tokens / 1024


def test_locks_fall_back_to_the_host_where_the_file_system_has_none(tmp_path, monkeypatch):
    flock, inodes = fcntl.flock, []

    def no_locks_here(descriptor, flags):
        if os.fstat(descriptor).st_ino == (tmp_path / "lock").stat().st_ino:
            raise OSError(errno.ENOSYS, "Function not implemented")
        inodes.append(os.fstat(descriptor).st_ino)
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", no_locks_here)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with locked(str(tmp_path / "lock"), "testing"):
        [lock] = tmp_path.glob("lm-*.lock")
        assert inodes == [lock.stat().st_ino]


@pytest.mark.ptb
def test_ptb_has_its_published_size(ptb_archive, tmp_path):
    data_path = str(tmp_path / "ptb")
    first = load_corpus(data_path, data_url=ptb_archive)
    assert first.name == "ptb"
    assert len(first.vocabulary) == 10_000
    assert first.vocabulary.words[:4] == ("the", UNK, EOS, "N")
    sizes = {"train": 929_589, "valid": 73_760, "test": 82_430}
    assert {split: len(getattr(first, split)) for split in sizes} == sizes
    assert not any(first.num_unknown.values())
    lines = (tmp_path / "ptb" / "ptb.valid.txt").read_text().splitlines()
    assert words_of(first, "valid") == [w for line in lines for w in [*line.split(), EOS]]
    start = time.monotonic()
    second = load_corpus(data_path)
    assert time.monotonic() - start < 1
    assert dataclasses.replace(second, train=0, valid=0, test=0) == dataclasses.replace(
        first, train=0, valid=0, test=0
    )
