"""The encoded form of a corpus: its location, its checksums, and when it is rebuilt."""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import lm.data.cache
import lm.data.corpus
from lm.config import Config
from lm.data.corpus import load_corpus
from lm.errors import RunError
from lm.tokens.symbols import BUILT
from lm.tokens.tokenizers import Words
from lm.tokens.vocabulary import EOS
from tests.commands import ROOT, run_code
from tests.unit.data.texts import load_obeying_permissions, words_of, write

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def encodings(monkeypatch):
    """The directories into which a corpus was encoded."""
    done, encode = [], lm.data.cache.encode_corpus

    def spy(*arguments):
        done.append(arguments[-1])
        return encode(*arguments)

    monkeypatch.setattr(lm.data.cache, "encode_corpus", spy)
    return done


def test_the_user_cache_is_used_for_a_read_only_directory(tmp_path):
    data_path = write(tmp_path / "d")
    os.chmod(data_path, 0o555)
    result = load_obeying_permissions(data_path)
    assert result.stdout.startswith(str(tmp_path / "user-cache" / "lm-corpus")), result.stderr
    assert f"cannot keep the encoded corpus in {data_path}/.cache: Permission" in result.stderr
    assert "encoding" not in load_obeying_permissions(data_path).stderr


@pytest.mark.parametrize("shared", ["d", "d/.cache", "d/.cache/entry"])
def test_a_cache_that_others_can_change_is_not_used(tmp_path, monkeypatch, encodings, shared):
    """A different user could replace the encoded files together with their checksums."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data_path = write(tmp_path / "d")
    load_corpus(data_path)
    (entry,) = tmp_path.glob("d/.cache/v*")
    assert entry.stat().st_mode & 0o777 == 0o700
    path = tmp_path / shared if shared != "d/.cache/entry" else entry
    path.chmod(0o775)
    for _ in range(2):
        assert load_corpus(data_path).train.filename.startswith(str(tmp_path / "cache"))
    assert len(encodings) == 2
    path.chmod(0o755)
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
        assert load_corpus(data_path).train.filename.startswith(str(tmp_path / "cache"))


def test_a_cache_is_private_with_any_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data_path, cache = write(tmp_path / "d"), tmp_path / "cache/lm-corpus"
    before = os.umask(0)
    try:
        (tmp_path / "d").chmod(0o777)
        assert load_corpus(data_path).train.filename.startswith(str(cache))
    finally:
        os.umask(before)
    paths = [cache, *cache.glob("*"), *cache.glob("*/v*")]
    assert len(paths) == 3 and not any(path.stat().st_mode & 0o022 for path in paths)


def test_no_place_for_the_cache_is_one_clear_error(tmp_path, monkeypatch):
    data_path = write(tmp_path / "d")
    (tmp_path / "file").write_text("not a directory")
    places = [str(tmp_path / "file" / "cache"), "/proc/nothing"]
    monkeypatch.setattr(lm.data.cache, "cache_directories", lambda _: places)
    with pytest.raises(RunError, match=r"file/cache: File exists; /proc/nothing: .*XDG_CACHE"):
        load_corpus(data_path)


def test_a_limit_on_the_address_space_is_one_clear_error(tmp_path):
    code = """
import logging, resource, sys
from lm.data.corpus import load_corpus, Config
from lm.errors import UserError
load = lambda: load_corpus(sys.argv[1], Config(tokenizer="bytes"))
load()
logging.basicConfig(level="INFO")
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    load()
except UserError as error:
    print(error)
"""
    data_path = write(tmp_path / "text", train="the cat\n" * (1 << 20))  # 32 MiB of token IDs
    result = run_code(code, data_path)
    message = (
        rf"cannot map {data_path}/.cache/\S+ into memory: raise the limit on the address space"
    )
    assert re.match(message, result.stdout) and "encoding" not in result.stderr


def test_the_second_start_does_not_encode(tmp_path, encodings):
    data_path = write(tmp_path / "d", valid="cow\n")
    first, second = load_corpus(data_path), load_corpus(data_path)
    assert len(encodings) == 1
    assert second.record == first.record
    assert second.encoded == first.encoded
    assert np.array_equal(second.train, first.train)
    assert load_corpus(data_path, Config(vocab_size=3)).tokenizer.tokens != first.tokenizer.tokens
    assert load_corpus(data_path, Config(min_count=3)).tokenizer.tokens != first.tokenizer.tokens
    assert len(encodings) == 3


def test_one_process_of_a_host_verifies_for_all(tmp_path, monkeypatch):
    data_path = write(tmp_path / "d")
    first = load_corpus(data_path)
    for module, name in [(lm.data.cache, "sha256_of"), (lm.data.corpus, "sha256_of_text")]:
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a file is read again"))
    second = load_corpus(data_path, verified=first.sha256)
    assert second.record == first.record and np.array_equal(second.train, first.train)


def test_a_run_that_resumes_does_not_encode_again(tmp_path, encodings):
    data_path = write(tmp_path / "d", valid="cow\n")
    first = load_corpus(data_path)
    again = load_corpus(data_path, tokenizer=first.tokenizer)
    assert again.train.filename == first.train.filename and again.encoded == first.encoded
    other = load_corpus(data_path, Config(vocab_size=4)).tokenizer
    assert load_corpus(data_path, tokenizer=other).tokenizer.tokens == other.tokens
    assert len(encodings) == 3


def test_changed_rules_encode_again(tmp_path):
    data_path = write(tmp_path / "d", train="House house a\n")
    shutil.copytree(ROOT / "lm", tmp_path / "lm", ignore=shutil.ignore_patterns("kernels"))
    code = (
        "import sys\nfrom lm.config import Config\nfrom lm.data.corpus import load_corpus\n"
        "print(*sorted(load_corpus(sys.argv[1], Config(vocab_size=9)).tokenizer.tokens))"
    )
    command = [sys.executable, "-c", code, data_path]
    found = subprocess.run(command, cwd=tmp_path, stdout=-1, text=True, timeout=50, check=True)
    assert found.stdout == "<eos> <unk> House a house\n"
    rules = tmp_path / "lm" / "tokens" / "tokenizers.py"
    old, new = "        return piece\n", "        return piece.lower()\n"
    assert old in rules.read_text()
    rules.write_text(rules.read_text().replace(old, new))
    found = subprocess.run(command, cwd=tmp_path, stdout=-1, text=True, timeout=50, check=True)
    assert found.stdout == "<eos> <unk> a house\n"


OTHER_DATA = {"tokenizer": "characters", "vocabulary": "v.txt", "vocab_size": 3, "min_count": 2}


def test_each_setting_of_the_data_changes_the_key_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("v.txt").write_text("<eos>\n<unk>\na\n")
    data_path = write("d", train="a b a b c\n")
    for name, value in OTHER_DATA.items():
        load_corpus(data_path, Config(**{name: value}))
    for split in ("train", "valid"):
        (tmp_path / f"{split}.bin").write_bytes(bytes(200))
    for dtype in ("uint16", "uint8"):
        load_corpus(str(tmp_path), Config(vocab_size=3, token_dtype=dtype))
    assert len([*pathlib.Path("d/.cache").glob("v*")]) == 4
    assert len([*pathlib.Path(".cache").glob("v*")]) == 2
    settings = {f.name for f in dataclasses.fields(Config) if f.metadata["affects"] == "data"}
    # The key contains the texts, which depend on `corpus` and `split`.
    tested = {*OTHER_DATA, "token_dtype", "corpus", "split"}
    assert settings == tested, "add the new setting to `_key` in lm/data/cache.py and to OTHER_DATA"


def test_pieces_with_the_same_entry_are_counted_together(tmp_path, monkeypatch):
    class Lower(Words):
        name = "lower"

        @staticmethod
        def entry(piece):
            return piece.lower()

    monkeypatch.setitem(BUILT, "lower", Lower)
    data_path = write(tmp_path / "d", train="House house house a\nHouse a\nhouse\n")
    vocabulary = load_corpus(data_path, Config(tokenizer="lower", min_count=3)).tokenizer.tokens
    assert vocabulary == ("house", "<eos>", "<unk>")  # 5, 3 and 2 occurrences


def test_a_changed_file_is_encoded_again(tmp_path, encodings):
    data_path = write(tmp_path / "d")
    load_corpus(data_path)
    before = os.stat(tmp_path / "d" / "test.txt")
    write(data_path, test="dog the\n")  # same size as before
    os.utime(tmp_path / "d" / "test.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert words_of(load_corpus(data_path), "test") == ["dog", "the", EOS]
    assert len(encodings) == 2


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm", [flip_bit, os.remove, lambda p: os.truncate(p, 4), lambda p: os.truncate(p, 0)]
)
@pytest.mark.parametrize("name", ["train.ids", "vocabulary.txt", "entry.json"])
def test_a_corrupt_cache_is_rebuilt(tmp_path, encodings, harm, name):
    data_path = write(tmp_path / "d")
    words = words_of(load_corpus(data_path), "train")
    [path] = (tmp_path / "d" / ".cache").glob(f"*/{name}")
    harm(path)
    assert words_of(load_corpus(data_path), "train") == words
    assert len(encodings) == 2
    load_corpus(data_path)
    assert len(encodings) == 2


@pytest.mark.parametrize("name", ["train.ids", "vocabulary.txt", "entry.json"])
def test_an_entry_that_is_unreadable_for_a_moment_is_not_replaced(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data_path = write(tmp_path / "d")
    words = words_of(load_corpus(data_path), "train")
    [path] = (tmp_path / "d" / ".cache").glob(f"*/{name}")
    path.unlink()
    path.symlink_to("/proc/self/mem")  # reading its first byte is an error
    assert words_of(load_corpus(data_path), "train") == words
    assert path.is_symlink() and len(list((tmp_path / "cache").glob("**/train.ids"))) == 1


def test_the_entry_of_a_faster_host_is_kept(tmp_path, monkeypatch):
    """If locks do not reach other hosts, the faster host already trains from its entry."""
    data_path = write(tmp_path / "d")
    created, encode = [], lm.data.cache.encode_corpus

    def encode_slowly(*arguments):
        monkeypatch.setattr(lm.data.cache, "encode_corpus", encode)
        monkeypatch.setattr(lm.data.cache, "locked", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(lm.data.cache, "private_name", lambda name: f"{name}-other-host")
        load_corpus(data_path)
        created.extend(path.stat().st_ino for path in (tmp_path / "d/.cache").glob("*/train.ids"))
        return encode(*arguments)

    monkeypatch.setattr(lm.data.cache, "encode_corpus", encode_slowly)
    load_corpus(data_path)
    [ids] = (tmp_path / "d/.cache").glob("*/train.ids")
    assert created == [ids.stat().st_ino]


def test_an_entry_that_an_old_list_of_files_hides_is_kept(tmp_path, monkeypatch):
    """NFS may show such a list to a host that waited for the lock of another host."""
    data_path = write(tmp_path / "d")
    load_corpus(data_path)
    [ids] = (tmp_path / "d/.cache").glob("*/train.ids")
    before = ids.stat().st_mtime_ns
    monkeypatch.setattr(lm.data.cache, "_find_entry", lambda *_: None)
    load_corpus(data_path)
    assert ids.stat().st_mtime_ns == before


def test_files_of_a_killed_process_are_removed(tmp_path):
    data_path = write(tmp_path / "d")
    left = pathlib.Path(lm.data.cache.private_name(f"{data_path}/.cache/encoding"))
    left.mkdir(parents=True)
    (left / "train.ids").write_bytes(b"half")
    load_corpus(data_path)
    assert not left.exists()


def test_a_file_that_changes_while_it_is_encoded_is_an_error(tmp_path, monkeypatch):
    data_path, encode = write(tmp_path / "d"), lm.data.cache.encode_corpus

    def change_and_encode(*arguments):
        write(data_path, train="something else entirely\n")
        return encode(*arguments)

    monkeypatch.setattr(lm.data.cache, "encode_corpus", change_and_encode)
    with pytest.raises(RunError, match=r"train\.txt changed"):
        load_corpus(data_path)
    assert not list((tmp_path / "d" / ".cache").glob("v*-*"))


@pytest.mark.timeout(200)  # a virtual machine may be paused
@pytest.mark.parametrize("corpus", ["files", "embedded"])
def test_many_processes_create_a_corpus_together_and_encode_it_once(tmp_path, corpus):
    data_path = str(tmp_path / "d")
    if corpus == "files":
        write(data_path, train="a b c d e f g\n" * 20_000)
    code = (
        "import sys, logging; logging.basicConfig(level=logging.INFO)\n"
        "from lm.config import Config\n"
        "from lm.data.corpus import load_corpus\n"
        "print(load_corpus(sys.argv[1], Config(corpus=sys.argv[2])).record.sha256)"
    )
    command = [sys.executable, "-c", code, data_path, corpus]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) for _ in range(4)]
    outputs = [rank.communicate(timeout=150) for rank in ranks]
    assert len({out for out, _ in outputs}) == 1
    assert outputs[0][0].strip()
    assert sum("encoding " in err and "/train.txt" in err for _, err in outputs) == 1


def test_words_and_characters_with_one_vocabulary_are_different_corpora(tmp_path):
    (tmp_path / "v.txt").write_text("<eos>\n<unk>\na\nb\nU+0020\n")
    data_path = write(tmp_path / "d", train="a b\nab\n" * 9)
    lengths = [
        len(
            load_corpus(data_path, Config(tokenizer=name, vocabulary=str(tmp_path / "v.txt"))).train
        )
        for name in ("words", "characters", "words")
    ]
    assert lengths == [45, 63, 45]
