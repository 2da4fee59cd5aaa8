"""The command that trains tokenizers: any form of a text gives the same file."""

import collections
import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.errors import UserError
from lm.tokenizer import (
    _first,
    _sample,
    find_train,
    read_complete_words,
    train_bpe,
    train_unigram,
)
from lm.tokens.subwords import load_subwords
from lm.tokens.text import Part, read_blocks
from tests.commands import one_error, run_module

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("sentencepiece")
pytestmark = pytest.mark.timeout(120)

KINDS = {"bpe": train_bpe, "unigram": train_unigram}
SAMPLE = "".join(
    f"{i} The cat's mat was {i % 7} feet wide,\r\n<|endoftext|>and the dog (漢字) sat!\n\n\n  \n"
    for i in range(300)
)


# Separators and white space of all kinds, at the borders of blocks.
PIECES = ["a", " ", "\n", "\r\n", "\x1c", "\u2028", "漢", ".", "'s", "12", "<|endoftext|>", "<|end"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=60).map(lambda pieces: "w" + "".join(pieces))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "train.txt"
    path.write_bytes(SAMPLE.encode())
    return path


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    return tmp_path_factory.mktemp("words") / "text.txt"


def trained(path, kind, split="0,0"):
    blocks = read_blocks(find_train(str(path), split).parts, "reading")
    return KINDS[kind](read_complete_words(blocks), 300).to_str(pretty=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_does_not_depend_on_files_and_threads(text, tmp_path, kind):
    (tmp_path / "train").mkdir()
    data = SAMPLE.encode()
    for begin in range(0, len(data), 7001):
        part = data[begin : begin + 7001]
        (tmp_path / f"train/{begin:05}-a.txt").write_bytes(part[:3000])
        (tmp_path / f"train/{begin:05}-b.txt.gz").write_bytes(gzip.compress(part[3000:]))
    output = tmp_path / "new.json"
    flags = ["--data_path", tmp_path, "--kind", kind, "--vocab_size", 300, "--output", output]
    result = run_module("lm.tokenizer", *flags, env={"RAYON_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"wrote {output}: 300 tokens\n"
    assert output.read_text() == trained(text, kind) == trained(text.parent, kind)
    result = run_module("lm.tokenizer", *flags)
    assert "already exists: choose a different file, or remove it" in one_error(result, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.json", "train"]


@pytest.fixture(scope="module")
def tokenizer(text, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    for kind in KINDS:
        (directory / f"{kind}.json").write_text(trained(text, kind))
    return {kind: load_subwords(str(directory / f"{kind}.json")) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40) | st.text(st.sampled_from(" \n\r\t▁Ġ\0é漢a<"), max_size=40))
def test_decoding_returns_any_text(tokenizer, kind, text):
    text = f"{text}<|endoftext|>{text}"
    ids = tokenizer[kind].encode(text)
    assert tokenizer[kind].decode(ids) == text
    assert tokenizer[kind].tokens.index("<|endoftext|>") in ids
    assert tokenizer[kind].tokens[tokenizer[kind].eos_id] == "\u010a"  # a line end


def test_a_sample_does_not_consist_of_rare_words(monkeypatch):
    monkeypatch.setattr("lm.tokenizer._SAMPLE_SIZE", 100)
    words = ["cat"] * 2000 + ["dog"] * 1000 + [str(i) for i in range(1000)]
    found = collections.Counter(_sample(collections.Counter(words)))
    assert (found["cat"], found["dog"], len(found)) == (50, 25, 100)
    words = ["cat"] * 20 + ["dog"] * 10 + [str(i) for i in range(20)]
    assert sorted(_sample(collections.Counter(words))) == sorted(words)


def test_bpe_uses_the_first_bytes_of_a_large_text(caplog):
    texts = [["the cat"], ["é", "dog"], ["the mat"]]
    assert list(_first(texts, 9)) == texts[:2]
    assert "training on the first" in caplog.text
    caplog.clear()
    assert list(_first(texts, 13)) == texts
    assert not caplog.records


def test_frequent_words_are_tokens(tokenizer):
    for kind in KINDS:
        assert {"Ġthe", "Ġcat", "Ċ"} <= set(tokenizer[kind].tokens)


@settings(max_examples=100, deadline=None)
@given(text=TEXT, block=st.integers(1, 20))
def test_blocks_do_not_change_the_words(text_file, text, block):
    text_file.write_bytes(text.encode())
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    blocks = read_blocks([Part(str(text_file))], "reading", block)
    found = [word for some in read_complete_words(blocks) for part in some for word in words(part)]
    expected = [word for part in text.split("<|endoftext|>") for word in words(part)]
    assert [word for word, _ in found] == [word for word, _ in expected]


@pytest.mark.parametrize("line_end", ["\r\n", "\n\u3000"])
def test_a_text_without_spaces_is_read_in_parts(tmp_path, monkeypatch, line_end):
    monkeypatch.setattr("lm.tokenizer._MAX_CHARACTERS", 100)
    (tmp_path / "text.txt").write_bytes(f"字字。{line_end}".encode() * 500)
    blocks = read_blocks([Part(str(tmp_path / "text.txt"))], "reading", 200)
    assert len([*read_complete_words(blocks)]) > 10


def test_only_the_training_lines_of_a_single_file_are_used(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a b c\n" * 90 + "zebra\n" * 10)
    vocabulary = json.loads(trained(path, "bpe", split="0,5"))["model"]["vocab"]
    assert any("ra" in token for token in vocabulary)
    vocabulary = json.loads(trained(path, "bpe", split="0,10"))["model"]["vocab"]
    assert not any("ra" in token for token in vocabulary)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.txt", b"a b\n", "does not contain train.txt: --data_path must be a text file"),
        ("train.npy", b"", "contains token IDs: a tokenizer is trained on text"),
        ("train.txt", b" \n\n", r"train.txt, line 3: the file does not contain any words"),
        ("train.txt", b"a \xff\n", r"train.txt, line 1: byte 0xff is not valid UTF-8"),
        ("train.txt", b"x" * 2_000_000, "characters without spaces and line ends: use --tokenizer"),
    ],
)
def test_an_invalid_text_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    for kind in KINDS:
        with pytest.raises(UserError, match=message) as raised:
            trained(tmp_path, kind)
        assert "\n" not in str(raised.value)
