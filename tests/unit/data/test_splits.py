"""Forms of a corpus: one file per split, directories of files, and a single file for all splits."""

import gzip
import itertools
import os
import re

import pytest

from lm.config import Config
from lm.data.corpus import load_corpus
from lm.data.splits import SPLITS, divide_file, find_splits
from lm.errors import UserError
from lm.tokens.text import BLOCK_BYTES, read_blocks
from tests.unit.data.texts import words_of, write

pytestmark = pytest.mark.timeout(60)

TEXT = "the cat sat\non the mäts\n\n" * 40


def load(directory, files, path="", **config):
    """Load a corpus that consists of these files, by relative path."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.encode()
        (directory / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return load_corpus(os.path.join(directory, path), Config(**config))


@pytest.mark.parametrize("tokenizer", ["words", "characters", "bytes"])
def test_a_text_in_parts_is_the_same_corpus(tmp_path, tokenizer, caplog):
    whole = load(
        tmp_path / "whole", {"train.txt": TEXT, "valid.txt": TEXT, "test.txt": TEXT},
        tokenizer=tokenizer,
    )  # fmt: skip
    data = TEXT.encode()
    cuts = [0, 7, data.index("ä".encode()) + 1, 300, 301, len(data)]  # within words and characters
    pieces = [data[begin:end] for begin, end in itertools.pairwise(cuts)]
    parts = load(
        tmp_path / "parts",
        {
            **{f"train/{i}.txt{'.gz' * (i % 2)}": piece for i, piece in enumerate(pieces)},
            "train/.ignored": "hidden",
            "val/only.txt": TEXT,
            "test.txt.gz": TEXT,
        },
        tokenizer=tokenizer,
    )
    assert parts.record.sha256 == whole.record.sha256
    joined = "the file before .* does not end with a line end, so its last word is joined"
    assert len(re.findall(joined, caplog.text)) == (tokenizer != "bytes")
    for split in ("train", "valid", "test"):
        assert getattr(parts, split).tobytes() == getattr(whole, split).tobytes()
        assert parts.encoded[split] == whole.encoded[split]


def test_the_test_split_is_optional(tmp_path):
    corpus = load(tmp_path, {"train.txt": TEXT, "val.txt": TEXT})
    assert corpus.test is None and len(corpus.valid) == len(corpus.train)


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize(
    ("split", "sizes"), [("5,5", (90, 5, 5)), ("10,20", (70, 10, 20)), ("1.9,0", (99, 1, None))]
)
def test_a_single_file_is_divided_by_lines(tmp_path, end, split, sizes):
    lines = [f"line {i}" for i in range(100)]
    text = "\n".join(lines) + end
    corpora = [
        load(tmp_path / name, {name: text}, name, split=split, tokenizer="characters")
        for name in ("a.txt", "b.md", "c.txt.gz")
    ]
    assert len({corpus.record.sha256 for corpus in corpora}) == 1
    begin = 0
    for name, size in zip(("train", "valid", "test"), sizes):
        if size is None:
            assert getattr(corpora[0], name) is None
            continue
        found = "".join(words_of(corpora[0], name))
        assert found.rstrip("\n").split("\n") == lines[begin : begin + size]
        begin += size


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("lines", [["line\n"] * 200_000, ["x" * 300_000 + "\n"] * 7 + ["end"]])
def test_a_large_file_is_divided_in_one_pass_and_two_blocks(tmp_path, monkeypatch, name, lines):
    text, sizes = "".join(lines).encode(), []

    def counting(*args):
        for block in read_blocks(*args):
            sizes.append(len(block.data))
            yield block

    monkeypatch.setattr("lm.data.splits.read_blocks", counting)
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    sources = divide_file(str(tmp_path / name), "30,15")
    assert sum(sizes) <= len(text) + 2 * BLOCK_BYTES
    test = int(len(lines) * 0.15)
    valid = test + int(len(lines) * 0.3)
    for split, part in zip(SPLITS, (lines[:-valid], lines[-valid:-test], lines[-test:])):
        found = b"".join(block.data for block in read_blocks(sources[split].parts, "reading"))
        assert found.decode() == "".join(part)


@pytest.mark.parametrize("share", ["x", "5", "5,5,5", "50,50", "-1,5", "nan,5", ""])
def test_invalid_percentages_are_one_line(tmp_path, share):
    with pytest.raises(UserError, match="split must be the percentages of valid and test"):
        load(tmp_path, {"a.txt": TEXT}, "a.txt", split=share)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "has no lines for train and valid"),
        ("a.txt", "a\nb", "has no lines for valid: check --split, or divide .* with head -c"),
        ("a.npy", "", r"a.npy has no lines: put train and valid files into a directory"),
    ],
)
def test_a_file_that_cannot_be_divided_is_one_line(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, {name: text}, name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train.txt", "train/a.txt"], r"/train and .*/train.txt both exist; remove one of them"),
        (["train.txt", "train.txt.gz"], "both exist"),
        (["train.txt", "val.txt", "valid.txt"], "valid.txt and .*/val.txt both exist"),
        (["train.txt", "valid.npy"], "contains texts and token IDs: put them into two directories"),
        (["train/a.txt", "train/b.bin"], "/train contains texts and token IDs: remove one of the"),
        (["train/a.txt", "train/b.md"], r"/train/b.md has an unknown ending: .* \.txt, \.txt\.gz"),
        (["train/.hidden"], "/train is empty: put the files of this split into it"),
    ],
)
def test_an_ambiguous_directory_is_one_line(tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, dict.fromkeys(files, TEXT))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_an_empty_split_of_bytes_is_one_line(tmp_path, split):
    data_path = write(tmp_path, **{split: ""})
    with pytest.raises(UserError, match=rf"/{split}\.txt does not contain any tokens"):
        load_corpus(data_path, Config(tokenizer="bytes"))


@pytest.mark.parametrize("name", ["train.txt", "train.npy", "train/a.txt"])
def test_a_pipe_does_not_block(tmp_path, name):
    (tmp_path / "train").mkdir()
    os.mkfifo(tmp_path / name)
    if name != "train/a.txt":
        (tmp_path / "train").rmdir()
    with pytest.raises(UserError, match=f"{name} is not a file"):
        load(tmp_path, {f"valid{os.path.splitext(name)[1]}": TEXT}, vocab_size=10)


def test_a_directory_without_train_has_no_splits(tmp_path):
    """The tests of a program are often in a directory with the name test."""
    (tmp_path / "test").mkdir()
    assert find_splits(str(tmp_path)) == {}
