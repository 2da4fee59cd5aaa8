"""Tokenizers: encoding in blocks, decoding, files of each format, and invalid files."""

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.config import Config
from lm.data.corpus import load_corpus
from lm.errors import UserError
from lm.inference.prompts import contains_at_end, decode_stream
from lm.tokens.selection import fixed_tokenizer, saved_tokenizer
from lm.tokens.subwords import load_subwords
from lm.tokens.symbols import Bytes, Characters
from lm.tokens.text import Part, TextSize, measured, read_blocks
from lm.tokens.tokenizers import UNKNOWN, Words
from lm.tokens.vocabulary import Vocabulary
from tests.unit.data.texts import write

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")
pytestmark = pytest.mark.timeout(120)

# White space of all kinds, line ends, emoji, combining characters and special tokens.
PIECES = ["a", "b", "the ", " ", "   ", "\n", "\n\n", "\r\n", "\t", "🙂", "é", "e\u0301", "漢字",
          ".", "12345", "'s", "x" * 9, "<|endoftext|>", "\u3000", "\u00a0"]  # fmt: skip
TEXT = st.lists(st.sampled_from(PIECES), max_size=60).map(lambda pieces: "w" + "".join(pieces))
SAMPLE = "the cat sat on the mat\nit was not the dog's mat, was it?\n" * 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Small tokenizers of each format, which were trained by the libraries."""
    path = tmp_path_factory.mktemp("tokenizers")
    (path / "text").write_text(SAMPLE)
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train(str(path / "text"), vocab_size=320, special_tokens=["<|endoftext|>"])
    bpe.save(str(path / "bpe.json"))
    (path / "gpt2").mkdir()
    bpe.save_model(str(path / "gpt2"))
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram())
    unigram.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    unigram.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>"
    )
    unigram.train([str(path / "text")], trainer)
    unigram.save(str(path / "unigram.json"))
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "text"), model_prefix=str(path / "sp"), vocab_size=22, minloglevel=2
    )
    return path


def read(tokenizer, path, block):
    ids = np.concatenate([*tokenizer.read_ids(read_blocks([Part(str(path))], "reading", block))])
    return ids.tolist()


@pytest.mark.parametrize("scheme", ["always", "first", "prefix", "normalizer"])
def test_a_scored_line_has_the_ids_of_this_line_in_a_corpus(tmp_path, scheme):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    if scheme == "prefix":
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    elif scheme == "normalizer":  # as Llama's tokenizer
        parts = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        model.normalizer = tokenizers.normalizers.Sequence(parts)
    else:
        model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    # A space and a line end can be one token, but not in front of a word.
    texts = [SAMPLE, "end \n" * 99]
    model.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=90))
    model.save(str(tmp_path / "model.json"))
    tokenizer = load_subwords(str(tmp_path / "model.json"))
    lines = ["the cat sat\n", "on the mat\n", "the mat\n"]
    (tmp_path / "text").write_text("".join(lines))
    corpus = read(tokenizer, tmp_path / "text", 99)
    scored = [token for line in lines[1:] for token in tokenizer.encode(line)]
    assert corpus[-len(scored) :] == scored
    assert model.encode(lines[1]).ids != tokenizer.encode(lines[1])


@pytest.mark.parametrize("kind", ["bytes", "bpe.json", "gpt2", "unigram.json", "sp.model"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, block=st.integers(1, 20))
def test_blocks_give_the_ids_of_the_whole_text(directory, kind, text, block):
    tokenizer = fixed_tokenizer(Config(tokenizer=path_of(directory, kind)), reads_ids=False)
    if kind.endswith("json") or kind == "gpt2":
        tokenizer = type(tokenizer)(
            {name.removeprefix("tokenizer/"): c for name, c in tokenizer.files.items()}, 12, 8
        )
    path = directory / "block.txt"
    path.write_bytes(text.encode())
    if kind == "sp.model" and not text.endswith("\n"):
        text += "\n"  # a complete line ends in </s>
    # `encode` is for texts after a line end. Some tokenizers add a space before the first line.
    ids = tokenizer._model.encode(text).ids if kind.endswith("json") else tokenizer.encode(text)
    expected = [UNKNOWN if i == tokenizer.unk_id else i for i in ids]
    assert read(tokenizer, path, block) == expected
    if kind in ("bytes", "bpe.json", "gpt2"):
        assert tokenizer.decode(expected) == text
        assert "".join(decode_stream(tokenizer, expected)) == text
        assert contains_at_end(tokenizer, expected, text[-5:])


@pytest.mark.parametrize("line_end", ["\r\n", "\n\u3000", "\n\n"])
def test_a_text_without_spaces_is_encoded_in_parts(directory, monkeypatch, line_end):
    monkeypatch.setattr("lm.tokens.subwords._MAX_TEXT", 1000)
    tokenizer = fixed_tokenizer(Config(tokenizer=str(directory / "bpe.json")), reads_ids=False)
    parts = type(tokenizer)({"tokenizer.json": next(iter(tokenizer.files.values()))}, 12, 8)
    (directory / "lines.txt").write_bytes(f"字字。{line_end}".encode() * 900)
    assert read(parts, directory / "lines.txt", 1000) == tokenizer.encode(f"字字。{line_end}" * 900)


def path_of(directory, kind):
    return kind if kind == "bytes" else str(directory / kind)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, block=st.integers(1, 20))
def test_characters_survive_encode_and_decode(tmp_path, text, block):
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    entries = dict.fromkeys(map(Characters.entry, text))
    tokenizer = Characters(Vocabulary(tuple(dict.fromkeys([*entries, "<eos>"]))))
    ids = tokenizer.encode(text)
    assert read(tokenizer, path, block) == ids
    assert tokenizer.decode(ids) == text == "".join(decode_stream(tokenizer, ids))
    assert "".join(tokenizer.tokens[i] for i in ids) == text


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, block=st.integers(1, 20))
def test_the_size_of_a_text_does_not_depend_on_blocks(tmp_path, text, block):
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    size = TextSize()
    assert b"".join(b.data for b in measured(read_blocks([Part(str(path))], "", block), size))
    num_words = len(text.split()) + text.count("\n") + (not text.endswith("\n"))
    assert size == TextSize(len(text.encode()), len(text), num_words)


def save(path, model, **parts):
    """Save a tokenizer of the library, and load it as a user does."""
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(path / "my.json"))
    return load_subwords(str(path / "my.json"))


def test_an_argument_that_is_not_utf8_has_its_bytes():
    assert Bytes().encode(os.fsdecode(b"caf\xe9")) == list(b"caf\xe9")


def test_streams_of_bytes_start_between_characters(tmp_path):
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    decoders = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    tokenizer = save(tmp_path, model, decoder=tokenizers.decoders.Sequence(decoders))
    text = "漢字" * 9 + "🙂"
    parts = list(decode_stream(tokenizer, tokenizer.encode(text)))
    assert [part for part in parts if part] == [*text]
    assert len(parts) == len(tokenizer.encode(text)) + 1  # one per token, and the rest


def test_dropout_of_merges_has_no_effect(tmp_path):
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    assert save(tmp_path, model).encode("ab" * 50) == [2] * 50


def test_ids_may_have_gaps(tmp_path):
    tokenizer = save(tmp_path, tokenizers.models.BPE({"a": 0, "b": 7}, []))
    assert len(tokenizer) == 8
    assert [tokenizer.tokens[i] for i in tokenizer.encode("ab")] == ["a", "b"]
    with pytest.raises(UserError, match=r"its largest ID, 4,194,304, is not below"):
        save(tmp_path, tokenizers.models.BPE({"a": 0, "b": 1 << 22}, []))


def test_unknown_text_is_listed(directory, tmp_path):
    unigram = tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)
    assert save(tmp_path, unigram).unk_id == 0
    word_piece = tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    spaces = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = save(tmp_path, word_piece, pre_tokenizer=spaces)
    assert tokenizer.unknown("a 漢\na zebra") == ["漢", "zebra"]
    assert load_subwords(str(directory / "sp.model")).unknown("the 漢\nthe cat") == ["漢"]


def test_a_tokenizer_that_drops_characters_is_reported(directory, tmp_path, caplog):
    for name in ("bpe.json", "unigram.json", "sp.model"):
        load_subwords(str(directory / name))
    assert not caplog.text
    save(tmp_path, tokenizers.models.BPE({"a": 0}, []))
    assert "drops characters" in caplog.text


def test_text_without_a_token_is_one_line(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0}, unk_token="<unk>")
    with pytest.raises(UserError, match=r"cannot encode the text: .*; use a tokenizer that has"):
        save(tmp_path, model).encode("b")


@pytest.mark.parametrize("content", [b"<eos>\r\na\r\n", b"\xef\xbb\xbf<eos>\na\n"])
def test_editors_may_have_changed_a_vocabulary(tmp_path, content):
    (tmp_path / "v.txt").write_bytes(content)
    tokenizer = fixed_tokenizer(Config(vocabulary=str(tmp_path / "v.txt")), reads_ids=False)
    assert tokenizer.tokens == ("<eos>", "a")


def test_words_are_joined_by_spaces_and_line_ends():
    words = Words(Vocabulary(("<eos>", "a", "b", "<unk>")))
    text = "a b\na\n\nb"
    assert words.decode(words.encode(text)) == text
    assert "".join(decode_stream(words, words.encode(text))) == text
    assert words.unknown("a zebra <unk>") == ["zebra"]


def test_special_tokens_have_one_id(directory):
    tokenizer = load_subwords(str(directory / "bpe.json"))
    assert tokenizer.tokens[tokenizer.encode("a<|endoftext|>b")[1]] == "<|endoftext|>"
    assert load_subwords(str(directory / "sp.model")).tokens[2] == "</s>"


def test_texts_start_after_a_line_end_or_else_after_a_separator(directory, tmp_path):
    """The corpus may not contain separators, and a model does not learn a token without them."""
    for name in ("bpe.json", "gpt2"):
        tokenizer = load_subwords(str(directory / name))
        assert tokenizer.eos_id == tokenizer.encode("a\n")[-1] != tokenizer.encode("a")[-1]
    sentence_piece = load_subwords(str(directory / "sp.model"))
    assert sentence_piece.tokens[sentence_piece.eos_id] == "</s>"
    words = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "[SEP]": 2}, unk_token="<unk>")
    assert save(tmp_path, words).eos_id == 2
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<nl>": 1}, "<unk>"))
    words.normalizer = tokenizers.normalizers.Replace("\n", "<nl>")
    words.save(str(tmp_path / "words.json"))
    assert load_subwords(str(tmp_path / "words.json")).eos_id == 1
    assert save(tmp_path, tokenizers.models.WordLevel({"a": 0}, unk_token="<unk>")).eos_id == 0


@pytest.mark.parametrize("kind", ["bpe.json", "gpt2", "sp.model", "bytes", "characters"])
def test_a_corpus_keeps_its_tokenizer(directory, tmp_path, kind):
    data_path = write(tmp_path / "d", train=SAMPLE, valid="the cat\n", test="a mat\n")
    name = kind if kind in ("bytes", "characters") else str(directory / kind)
    corpus = load_corpus(data_path, Config(tokenizer=name))
    corpus.tokenizer.save(str(tmp_path / "run"))
    again = saved_tokenizer(str(tmp_path / "run"))
    assert again.sha256 == corpus.tokenizer.sha256
    assert again.tokens == corpus.tokenizer.tokens
    assert again.decode(corpus.valid).strip() == "the cat"
    assert load_corpus(data_path, Config(tokenizer=name)).train.filename == corpus.train.filename
    assert corpus.encoded["valid"].size == TextSize(8, 8, 3)


def test_only_words_and_characters_limit_the_vocabulary(tmp_path):
    data_path = write(tmp_path / "d")
    corpus = load_corpus(data_path, Config(tokenizer="characters", vocab_size=5))
    assert len(corpus.tokenizer) == 5 and corpus.tokenizer.unk_id is not None
    with pytest.raises(UserError, match=r"--min_count is for .* bytes has a fixed vocabulary"):
        load_corpus(data_path, Config(tokenizer="bytes", min_count=2))


def test_too_many_characters_suggest_bytes(tmp_path):
    text = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x14000)])).replace("\r", "")
    with pytest.raises(UserError, match="65,536 different characters: use --tokenizer bytes"):
        load_corpus(write(tmp_path / "d", train=text), Config(tokenizer="characters"))


def test_bytes_may_be_any_bytes(tmp_path):
    data_path = write(tmp_path / "d", train=b"\xff\x00\xfe" * 100)
    corpus = load_corpus(data_path, Config(tokenizer="bytes"))
    assert corpus.train[:3].tolist() == [255, 0, 254]
    assert isinstance(corpus.tokenizer, Bytes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: use words, characters, bytes, or the path"),
        (b"", "is not a tokenizer: it is neither a tokenizer.json nor a SentencePiece model"),
        (b"{", "is not a tokenizer"),
        (b"[" * 100_000, "is not a tokenizer: it is neither"),
        (b'{"version": "1.0"}', "is not a tokenizer"),
        (b"\x0a\x0e\x0a", "is not a tokenizer"),
    ],
)
def test_an_invalid_tokenizer_is_one_line(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        load_corpus(write(tmp_path / "d"), Config(tokenizer=str(path)))
    assert "\n" not in str(raised.value)


def test_a_directory_without_a_tokenizer_names_the_formats(tmp_path):
    with pytest.raises(UserError, match=r"must contain one of: .*encoder.json and vocab.bpe"):
        load_subwords(str(tmp_path))
    for vocabulary, merges in (({"a": 0}, "a b c\n"), ({"a": 0}, "a b\n"), ([1], ""), ({}, "")):
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        (tmp_path / "merges.txt").write_text(merges)
        with pytest.raises(UserError, match="is not a tokenizer"):
            load_subwords(str(tmp_path))
