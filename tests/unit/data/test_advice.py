"""Texts that are valid, but that are probably not what the user meant."""

import io
import logging
import os

import pytest

from lm.config import Config, RunOptions
from lm.data.corpus import load_corpus, load_corpus_to_train
from lm.errors import UserError
from lm.inference.lines import split_lines
from tests.unit.data.texts import write

LINES = "the cat sat on a mat\n" * 50


@pytest.mark.parametrize(
    "texts, advice",
    [
        ({}, None),
        ({"train": LINES.replace("\n", "\r\n")}, None),
        ({"train": LINES.replace("sat", "sat <eos>")}, "contains <eos> 50 times"),
        ({"valid": LINES + "zebra\n"}, "<unk> never occurs in train"),
    ],
)
def test_a_suspicious_text_is_one_line_of_advice(tmp_path, caplog, texts, advice):
    caplog.set_level(logging.WARNING, "lm")
    texts = {"train": LINES, "valid": LINES, "test": LINES, **texts}
    load_corpus(write(tmp_path / "d", **texts))
    assert len(caplog.records) == (advice is not None)
    assert advice is None or advice in caplog.text


@pytest.mark.parametrize("tokenizer", ["words", "characters", "bytes"])
@pytest.mark.parametrize("num_line_ends", [0, 1, 2])
def test_a_model_of_a_single_line_cannot_score_line_ends(
    tmp_path, caplog, tokenizer, num_line_ends
):
    caplog.set_level(logging.WARNING, "lm")
    train = LINES.replace("\n", " ") + "\n" * num_line_ends
    data_path = write(tmp_path / "d", train=train, valid=LINES, test=LINES)
    corpus = load_corpus(data_path, Config(tokenizer=tokenizer))
    advice = "train is a single line, so the model cannot learn the probability of line ends"
    assert (advice in caplog.text) == (num_line_ends < 2)
    caplog.clear()
    load_corpus(data_path, tokenizer=corpus.tokenizer)  # as an evaluation does
    assert not caplog.text


def test_advice_about_a_given_vocabulary_names_its_file(tmp_path, caplog):
    """Flags that limit the vocabulary would be rejected."""
    caplog.set_level(logging.WARNING, "lm")
    file = tmp_path / "words.txt"
    data_path = write(tmp_path / "d", train=LINES, valid=LINES, test=LINES)
    file.write_text("<eos>\n<unk>\nthe\ncat\nsat\non\na\nmat\n")
    load_corpus(data_path, Config(vocabulary=str(file)))
    assert not caplog.records
    file.write_text("<eos>\nthe\ncat\nsat\non\na\n")
    message = "50 words that are not in .*words.txt, .*: add <unk> or these words$"
    with pytest.raises(UserError, match=message):
        load_corpus(data_path, Config(vocabulary=str(file)))


def test_adaptive_layers_need_a_vocabulary_that_is_sorted_by_frequency(tmp_path, caplog):
    data_path = write(tmp_path / "d", train="the cat\n" * 300 + "mat on a sat\n")
    words = ["<eos>", "<unk>", "a", "mat", "on", "sat", "cat", "the"]
    file = tmp_path / "words.txt"
    for order, num_warnings in ([words, 1], [["<eos>", *words[:0:-1]], 0]):
        file.write_text("".join(f"{word}\n" for word in order))
        config = Config(vocabulary=str(file), adaptive_softmax_cutoffs="4")
        caplog.clear()
        load_corpus_to_train(config, RunOptions(data_path=data_path))
        assert caplog.text.count("would cover 100%: sort the vocabulary") == num_warnings


JAPANESE = "今日はとても良い天気です。\n明日はたぶん雨が降るでしょう。\n"


def test_the_advised_min_count_creates_unknown_words(tmp_path, caplog):
    data_path = write(tmp_path / "d", train=LINES + "rare words\n" * 3, valid=LINES + "zebra\n")
    load_corpus_to_train(Config(min_count=2), RunOptions(data_path=data_path))
    assert "<unk> never occurs in train" in caplog.text and "add --min_count 4" in caplog.text
    caplog.clear()
    load_corpus_to_train(Config(min_count=4), RunOptions(data_path=data_path))
    assert "<unk> never occurs" not in caplog.text


@pytest.mark.parametrize(("text", "is_advised"), [(JAPANESE, True), (LINES, False)])
def test_a_text_without_spaces_is_a_warning(tmp_path, caplog, text, is_advised):
    load_corpus(write(tmp_path / "d", train=text, valid=text + "犬 z\n"))
    assert ("the text has no spaces between words" in caplog.text) == is_advised
    assert ("<unk> never occurs" in caplog.text) != is_advised


@pytest.mark.parametrize("cutoffs", ["", "5"])  # the adaptive softmax is for large vocabularies
def test_a_vocabulary_that_needs_much_memory_is_a_warning(tmp_path, caplog, cutoffs):
    text = "".join(f"{number:x}\n" for number in range(400_000))
    options = RunOptions(data_path=write(tmp_path / "d", train=text))
    load_corpus_to_train(Config(adaptive_softmax_cutoffs=cutoffs), options)
    assert ("the vocabulary has 400,00" in caplog.text) == (not cutoffs)


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.json.gz", "train/part-0.jsonl"])
def test_json_is_not_read_as_text(tmp_path, name):
    (tmp_path / "train").mkdir()
    (tmp_path / name).write_text('{"text": "a b"}\n' * 100)
    path = tmp_path if os.sep in name else tmp_path / name
    with pytest.raises(UserError, match=f"{name} contains JSON: write its texts into a .txt file"):
        load_corpus(str(path))


@pytest.mark.parametrize("name", ["text.txt.zst", "text.bz2", "corpus.tar.gz", "book.epub"])
def test_a_file_that_is_not_a_text_is_an_error(tmp_path, name):
    (tmp_path / name).write_bytes(b"\0\1\n" * 100)
    with pytest.raises(UserError, match=f"{name} is not a text: convert it to a .txt file"):
        load_corpus(str(tmp_path / name))


def test_a_text_in_utf_16_is_an_error(tmp_path):
    with pytest.raises(UserError, match="line 1: the file contains NUL: convert UTF-16 to UTF-8"):
        load_corpus(write(tmp_path / "d", train=LINES.encode("utf-16-le")))


@pytest.mark.parametrize("size, is_valid", [(300_000, True), (500_000, False)])
def test_a_long_line_is_read_in_linear_time_up_to_a_limit(size, is_valid):
    file = io.BytesIO(b"x" * size + b"\nend")
    lines = split_lines(iter(lambda: file.read(100), b""), "text", max_bytes=400_000)
    if is_valid:
        assert [line for some in lines for line in some] == ["x" * size, "end"]
    else:
        with pytest.raises(UserError, match=r"^text, line 1: the line has more than 400000 bytes"):
            list(lines)
