"""The tokenizers `characters`, `bytes` and `ids`. Their tokens are not words."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from lm.errors import UserError
from lm.tokens.text import Block, decode_blocks
from lm.tokens.tokenizers import SAVED, Tokenizer, Words
from lm.tokens.vocabulary import EOS, Vocabulary

IDS_FILE = f"{SAVED}/ids.txt"
_MAX_CHARACTERS = 65_536  # different characters


class Characters(Words):
    """Unicode characters, including line ends.

    In the vocabulary, a line end is `<eos>`, and other white space is written like `U+0020`.
    """

    name = "characters"
    saved_as = f"{SAVED}/characters.txt"

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        if len(vocabulary) > _MAX_CHARACTERS:
            raise UserError(
                f"the text has more than {_MAX_CHARACTERS:,} different characters: use --tokenizer"
                " bytes, or limit the vocabulary with --vocab_size"
            )
        self.tokens = [_character(word) for word in vocabulary.words]

    @staticmethod
    def read_pieces(blocks: Iterable[Block]) -> Iterator[Sequence[str]]:
        return (block.data for block in decode_blocks(blocks))

    @staticmethod
    def pieces(text: str) -> Sequence[str]:
        return text

    @staticmethod
    def entry(piece: str) -> str:
        if piece == "\n":
            return EOS
        return f"U+{ord(piece):04X}" if piece.isspace() else piece

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.tokens[i] for i in ids)


def _character(word: str) -> str:
    if word == EOS:
        return "\n"
    return chr(int(word[2:], 16)) if word.startswith("U+") else word


class Bytes(Tokenizer):
    """The 256 values of a byte. Text is encoded in UTF-8, but files may contain any bytes."""

    name = "bytes"
    tokens = tuple(bytes([value]).decode("latin-1") for value in range(256))
    eos_id = ord("\n")
    sha256 = hashlib.sha256(b"bytes").hexdigest()
    files = types.MappingProxyType({f"{SAVED}/bytes.txt": b""})

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogateescape"))  # as in arguments of commands

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(map(int, ids)).decode(errors="replace")

    def read_ids(self, blocks: Iterable[Block]) -> Iterator[np.ndarray]:
        return (np.frombuffer(block.data, np.uint8) for block in blocks)


class Ids(Tokenizer):
    """Token IDs whose text is not known. Texts consist of these IDs as decimal numbers."""

    name, eos_id = "ids", 0

    def __init__(self, vocab_size: int):
        self.tokens = list(map(str, range(vocab_size)))
        self.sha256 = hashlib.sha256(f"ids {vocab_size}".encode()).hexdigest()
        self.files = {IDS_FILE: f"{vocab_size}\n".encode()}

    def encode(self, text: str) -> list[int]:
        ids = [int(word) if word.isdecimal() else len(self) for word in text.split()]
        if any(i >= len(self) for i in ids):
            raise UserError(f"{text[:40]!r} must consist of token IDs from 0 to {len(self) - 1}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(f"{i} " for i in ids)

    def read_ids(self, blocks: Iterable[Block]) -> Iterator[np.ndarray]:
        raise UserError("a model of token IDs without a tokenizer cannot read text")


# Tokenizers by name. The vocabulary of a tokenizer in BUILT is built from the training text.
BUILT: Mapping[str, type[Words]] = {"words": Words, "characters": Characters}
FIXED: Mapping[str, type[Tokenizer]] = {"bytes": Bytes}
