"""Subword tokenizers that the libraries `tokenizers` and `sentencepiece` read from files.

`tokenizers` reads Hugging Face's `tokenizer.json`, and GPT-2's `encoder.json` and `vocab.bpe`.
`sentencepiece` reads SentencePiece's `.model` files.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lm import logger
from lm.errors import UserError, error_class, first_line, needs_extra
from lm.files import open_regular
from lm.tokens.text import Block, decode_blocks
from lm.tokens.tokenizers import SAVED, UNKNOWN, Tokenizer

# The names of the files of each format, and the names of their saved copies.
_HUGGING_FACE, _SENTENCE_PIECE = "tokenizer.json", "tokenizer.model"
_GPT2 = ("vocab.json", "merges.txt")
_FORMATS = {
    (_HUGGING_FACE,): (_HUGGING_FACE,),
    _GPT2: _GPT2,
    ("encoder.json", "vocab.bpe"): _GPT2,
    (_SENTENCE_PIECE,): (_SENTENCE_PIECE,),
}
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_UNKNOWN_CHARACTER = "\U000f0000"  # for private use
_WINDOW, _MARGIN = 1 << 16, 1 << 10  # characters
_WINDOWS_AT_ONCE = 32
_CUT = re.compile(r"(?<=\S)\s+(?=\S)")
_MAX_TEXT = 1 << 26  # characters
_MAX_LINE = 1 << 24  # characters
_MAX_IDS = 1 << 22  # including the gaps between the IDs of a vocabulary


def load_subwords(path: str) -> Tokenizer:
    """Read a tokenizer from a file, or from a directory in the format of GPT-2's release.

    Raises:
      UserError: If the path is missing or is not a tokenizer.
    """
    files = _read(path)
    kind = _SentencePiece if _SENTENCE_PIECE in files else _HuggingFace
    try:
        tokenizer = kind(files)
    except UserError:
        raise
    except Exception as error:  # The libraries raise errors of many types.
        raise UserError(f"{path} is not a tokenizer: {first_line(error)}") from error
    with contextlib.suppress(UserError):  # Some tokenizers reject unknown characters.
        if tokenizer.unk_id is None and not tokenizer.encode(_UNKNOWN_CHARACTER):
            logger.warning(
                "the tokenizer %s drops characters that it does not know, so bits per byte may be"
                " too low: use a tokenizer that has an unknown token or the 256 bytes",
                path,
            )
    return tokenizer


def _read(path: str) -> dict[str, bytes]:
    """Return the contents of the files of a tokenizer, by the names of their saved copies."""
    if os.path.isdir(path):
        for names, saved in _FORMATS.items():
            paths = [os.path.join(path, name) for name in names]
            if all(map(os.path.exists, paths)):
                return {name: _content(p) for name, p in zip(saved, paths)}
        expected = "; ".join(" and ".join(names) for names in _FORMATS)
        raise UserError(f"the tokenizer {path} must contain one of: {expected}")
    content = _content(path)
    return {_HUGGING_FACE if content.lstrip()[:1] == b"{" else _SENTENCE_PIECE: content}


def _content(path: str) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError as error:
        raise UserError(
            f"the tokenizer {path} does not exist: use words, characters, bytes, or the path of a"
            " tokenizer.json, of a SentencePiece model or of a directory with GPT-2's files"
        ) from error
    except OSError as error:
        raise error_class(error)(f"cannot read {path}: {error.strerror}") from error


class _Subwords(Tokenizer):
    """A tokenizer that is read from files."""

    def __init__(self, files: Mapping[str, bytes]):
        self.files = {f"{SAVED}/{name}": content for name, content in files.items()}
        digest = hashlib.sha256()
        for name, content in files.items():
            digest.update(f"{name} {len(content)}\n".encode() + content)
        self.sha256 = digest.hexdigest()

    def _as_array(self, ids: Any) -> np.ndarray:
        found = np.array(ids, np.int64)
        if self.unk_id is not None:
            found[found == self.unk_id] = UNKNOWN
        return found


class _SentencePiece(_Subwords):
    """A SentencePiece model. It encodes each line separately, and adds `</s>` to each line."""

    name = "sentencepiece"

    def __init__(self, files: Mapping[str, bytes]):
        super().__init__(files)
        with needs_extra("tokenizers"):
            from sentencepiece import SentencePieceProcessor
        try:
            if not files[_SENTENCE_PIECE]:
                raise RuntimeError("the file is empty")
            self._model = SentencePieceProcessor(model_proto=files[_SENTENCE_PIECE])
        except RuntimeError as error:
            raise ValueError("it is neither a tokenizer.json nor a SentencePiece model") from error
        size = self._model.get_piece_size()
        self.tokens = [self._model.id_to_piece(i) for i in range(size)]
        self.unk_id, self.eos_id = self._model.unk_id(), self._model.eos_id()
        if self.eos_id < 0:
            raise UserError("the SentencePiece model has no </s>: train it with an eos_id")

    def encode(self, text: str) -> list[int]:
        return [token for ids in self._lines(text) for token in ids]

    def _lines(self, text: str) -> Iterator[list[int]]:
        """Yield the IDs of each line. Only lines with a line end have `</s>` at their end."""
        *lines, last = text.split("\n")
        for ids in self._model.encode(lines, num_threads=os.cpu_count() or 1):
            yield [*ids, self.eos_id]
        if last:
            yield self._model.encode(last)

    def unknown(self, text: str) -> list[str]:
        lines = self._model.encode(text.split("\n"), out_type=str)
        pieces = itertools.chain.from_iterable(lines)
        return [piece for piece in pieces if self._model.piece_to_id(piece) == self.unk_id]

    def decode(self, ids: Iterable[int]) -> str:
        lines: list[list[int]] = [[]]
        for token in ids:
            lines.append([]) if token == self.eos_id else lines[-1].append(token)
        return "\n".join(self._model.decode(lines))

    def read_ids(self, blocks: Iterable[Block]) -> Iterator[np.ndarray]:
        rest = ""
        for block in decode_blocks(blocks):
            text, line_end, last = (rest + block.data).rpartition("\n")
            rest = last
            if len(rest) > _MAX_LINE:
                raise UserError(
                    f"{block.part.path} has a line of more than {_MAX_LINE} characters, and"
                    " SentencePiece encodes whole lines: divide it, for example with fold -s"
                )
            yield self._as_array(self.encode(text + line_end))
        if rest:
            yield self._as_array(self.encode(rest + "\n"))


class _HuggingFace(_Subwords):
    """A tokenizer that the library `tokenizers` reads."""

    def __init__(self, files: Mapping[str, bytes], window: int = _WINDOW, margin: int = _MARGIN):
        super().__init__(files)
        self._window, self._margin = window, margin
        with needs_extra("tokenizers"):
            import tokenizers
        if _HUGGING_FACE in files:
            self._model = tokenizers.Tokenizer.from_str(files[_HUGGING_FACE].decode())
        else:
            self._model = _gpt2(files)
        self._model.no_padding()
        self._model.no_truncation()
        ids = self._model.get_vocab().values()
        if not ids:
            raise ValueError("it has no tokens")
        if max(ids) >= _MAX_IDS:
            raise ValueError(f"its largest ID, {max(ids):,}, is not below {_MAX_IDS:,}")
        # The IDs of some vocabularies have gaps.
        self.tokens = [self._model.id_to_token(i) or "" for i in range(max(ids) + 1)]
        model = json.loads(self._model.to_str())["model"]
        self.name = model["type"].lower()  # such as bpe or unigram
        self.unk_id = model.get("unk_id")  # only unigram models have this key
        if model.get("unk_token") is not None:
            self.unk_id = self._model.token_to_id(model["unk_token"])
        if model.get("dropout"):
            self._model.model.dropout = None  # Random merges would differ between hosts.
        line_end: list[int] = []
        with contextlib.suppress(UserError):
            line_end = self._encode(["\n"])[0].ids
        self._reads_line_ends = bool(line_end)  # Otherwise, places in a text may be wrong.
        self.eos_id = self._find_eos_id(line_end)

    def _find_eos_id(self, line_end: Sequence[int]) -> int:
        found = [i for i in line_end[-1:] if i != self.unk_id]
        separators = [i for i in map(self._model.token_to_id, _SEPARATORS) if i is not None]
        # Most corpora contain line ends but no <|endoftext|>, whose weights then stay random.
        is_line_end = self.decode(found) in ("\n", "<0x0A>")
        return next(iter([*found, *separators] if is_line_end else [*separators, *found]), 0)

    def encode(self, text: str) -> list[int]:
        # Some tokenizers add a space before a text, but not after the line ends in a text.
        if self._reads_line_ends:
            encoded = self._encode([f"\n{text}"])[0]
            first = _token_at(encoded, 1)
            if first is not None:
                return encoded.ids[first:]
        return self._encode([text])[0].ids

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        try:
            return self._model.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # The library does not define its own error types.
            raise UserError(
                f"the tokenizer cannot encode the text: {first_line(error)}; use a tokenizer that"
                " has an unknown token or the 256 bytes"
            ) from error

    def unknown(self, text: str) -> list[str]:
        found = self._encode([text])[0]
        places = zip(found.ids, found.offsets)
        return [text[start:end] for token, (start, end) in places if token == self.unk_id]

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode(list(ids), skip_special_tokens=False)

    def read_ids(self, blocks: Iterable[Block]) -> Iterator[np.ndarray]:
        """Yield the token IDs of a text. See `Tokenizer`.

        The text is encoded in windows. Adjacent windows overlap by a margin on each side of a
        possible joint: the start of white space between two other characters. The windows are
        joined there if a token begins at the joint in both windows, and if both windows have the
        same tokens around the joint.
        """
        text, begin = "", 0  # The IDs of text[:begin] have been yielded.
        wanted = length = self._window * _WINDOWS_AT_ONCE
        for block in decode_blocks(blocks):
            text += block.data
            if len(text) - begin < wanted:
                continue
            ids, _, end = self._encode_windows(text, begin)
            yield self._as_array(ids)
            wanted = length if ids else 2 * wanted
            if wanted > _MAX_TEXT:
                raise UserError(
                    f"{block.part.path} cannot be encoded in parts: it has no spaces and line ends,"
                    " or this tokenizer depends on the text as a whole"
                )
            keep = max(end - self._margin, 0)
            text, begin = text[keep:], end - keep
        ids, rest, _ = self._encode_windows(text, begin)
        yield self._as_array(ids + rest)

    def _encode_windows(self, text: str, begin: int) -> tuple[list[int], list[int], int]:
        """Encode text[begin:]. Return the IDs before and after the last joint, and this joint."""
        cuts = [begin]
        while match := _CUT.search(text, cuts[-1] + self._window):
            cuts.append(match.start())
        while True:
            starts = [max(cut - self._margin, 0) for cut in cuts]
            ends = [*(cut + self._margin for cut in cuts[1:]), len(text)]
            windows = [text[start:end] for start, end in zip(starts, ends)]
            found = self._encode(windows)
            # The first token after each cut, in the window after the cut and in the window before.
            after = [_token_at(enc, cut - start) for enc, cut, start in zip(found, cuts, starts)]
            before = [_token_at(enc, cut - s) for enc, cut, s in zip(found, cuts[1:], starts)]
            joints = [
                _around(left, i) == _around(right, j) != []
                for left, i, right, j in zip(found, before, found[1:], after[1:])
            ]
            if all(joints):
                break
            cuts = [begin, *itertools.compress(cuts[1:], joints)]
        after[0] = after[0] if begin else 0
        ids = [i for enc, a, b in zip(found, after, before) for i in enc.ids[a:b]]
        return ids, found[-1].ids[after[-1] :], cuts[-1]


def byte_level(model: Any) -> Any:
    """Return a tokenizer that divides a text into words of bytes, as GPT-2's tokenizer does."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2(files: Mapping[str, bytes]) -> Any:
    """Return the tokenizer of GPT-2's release."""
    from tokenizers import models

    vocabulary, merges = (files[name].decode() for name in _GPT2)
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    pairs = [tuple(line.split(" ")) for line in lines]
    model = byte_level(models.BPE(vocab=json.loads(vocabulary), merges=pairs))
    model.add_special_tokens([name for name in _SEPARATORS if model.token_to_id(name) is not None])
    return model


def _token_at(encoded: Any, place: int) -> int | None:
    """Return the token that begins at a character, or None if no token begins there.

    If no token contains the character, return the token that begins at the next character.
    """
    token = encoded.char_to_token(place)
    if token is None:
        place += 1
        token = encoded.char_to_token(place)
    return token if token is not None and encoded.token_to_chars(token)[0] == place else None


def _around(encoded: Any, token: int | None) -> list[int]:
    """Return the IDs of the previous token and of a token, or [] if the token is None."""
    return [] if token is None else encoded.ids[max(token - 1, 0) : token + 1]
