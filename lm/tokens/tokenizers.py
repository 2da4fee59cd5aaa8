"""Tokenizers: they convert text to token IDs and back.

Only tokenizers divide text into tokens and join tokens to text. This module has the default
tokenizer, `words`. Its vocabulary is built from the training text. lm/tokens/symbols.py has
`characters`, `bytes` and `ids`, and lm/tokens/subwords.py reads tokenizers from files.
lm/tokens/selection.py selects the tokenizer of a run.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from lm import logger
from lm.errors import UserError
from lm.files import write_atomically
from lm.tokens.text import Block, decode_blocks
from lm.tokens.vocabulary import EOS, Vocabulary

# The files of a tokenizer in a run directory and in the cache. Only `words` uses the first one.
VOCABULARY_FILE, SAVED = "vocabulary.txt", "tokenizer"
UNKNOWN = -1  # the ID of text outside the vocabulary in the results of `read_ids`
_MAX_WORD_CHARACTERS = 1 << 20
_SPACES = "\n \t\r"


class Tokenizer(abc.ABC):
    """Converts text to token IDs and back.

    Attributes:
      name: The kind of the tokenizer, such as `words` or `bpe`.
      tokens: The text of each token, for user-defined networks and for messages.
      eos_id: The ID of a line end, or of another token that separates texts. A model reads this
        token before the first token of a text.
      unk_id: The ID of text outside the vocabulary, or None.
      sha256: A checksum that identifies the vocabulary and the rules of the tokenizer.
      sorts_by_frequency: Whether frequent tokens have small IDs.
      files: The contents of the files that `saved_tokenizer` reads, by relative path.
    """

    name: str
    tokens: Sequence[str]
    eos_id: int
    unk_id: int | None = None
    sha256: str
    sorts_by_frequency = False
    files: Mapping[str, bytes]

    def __len__(self) -> int:
        return len(self.tokens)

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text that follows a line end."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token IDs."""

    @abc.abstractmethod
    def read_ids(self, blocks: Iterable[Block]) -> Iterator[np.ndarray]:
        """Read a text in blocks of bytes, and yield an array of some token IDs at a time.

        `encode` would return the same IDs, except that the ID of text outside the vocabulary is
        UNKNOWN here.
        """

    def unknown(self, text: str) -> list[str]:
        """List the parts of a text that are outside the vocabulary."""
        return []

    def save(self, directory: str) -> None:
        """Write the files that `saved_tokenizer` reads."""
        for name, content in self.files.items():
            path = os.path.join(directory, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomically(path, content)


def split_words(text: str) -> list[str]:
    """Return the words of a text, with `<eos>` for each line end."""
    return text.replace("\n", f" {EOS} ").split()


def read_words(blocks: Iterable[Block]) -> Iterator[list[str]]:
    """Yield the words of a text, one list of words at a time.

    If the last line has no line end, a line end is added. Each list ends between two words, and not
    necessarily at a line end, because some corpora consist of one line of a gigabyte.
    """
    rest, last, num_eos = "", "\n", 0
    for block in decode_blocks(blocks):
        last = block.data[-1:] or last
        text = rest + block.data
        end = max(map(text.rfind, _SPACES)) + 1
        text, rest = text[:end], text[end:]
        if len(rest) > _MAX_WORD_CHARACTERS:
            raise UserError(
                f"{block.part.path}, line {block.line + block.data.count(chr(10))}: a word has more"
                f" than {_MAX_WORD_CHARACTERS} characters, so this is not a text file,"
                " or it needs --tokenizer characters or bytes"
            )
        num_eos += text.count(EOS)
        yield split_words(text)
    num_eos += rest.count(EOS)
    if num_eos:
        name = block.part.path
        logger.warning(f"{name} contains {EOS} {num_eos} times, and each line end adds another")
    yield split_words(rest if last == "\n" else rest + "\n")


class Words(Tokenizer):
    """Words that are separated by white space. Each line end is the word `<eos>`."""

    name, sorts_by_frequency = "words", True
    saved_as = VOCABULARY_FILE

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary, self.tokens = vocabulary, vocabulary.words
        self.eos_id, self.unk_id = vocabulary.eos_id, vocabulary.unk_id
        self.sha256 = vocabulary.sha256
        self.files = {self.saved_as: vocabulary.content}

    @staticmethod
    def read_pieces(blocks: Iterable[Block]) -> Iterator[Sequence[str]]:
        """Yield the pieces of a text, one sequence of pieces at a time."""
        return read_words(blocks)

    @staticmethod
    def pieces(text: str) -> Sequence[str]:
        """Divide a text into pieces."""
        return split_words(text)

    @staticmethod
    def entry(piece: str) -> str:
        """Return the word of the vocabulary that represents a piece."""
        return piece

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(map(self.entry, self.pieces(text)))

    def unknown(self, text: str) -> list[str]:
        return [p for p in self.pieces(text) if self.entry(p) not in self.vocabulary.ids]

    def decode(self, ids: Iterable[int]) -> str:
        words = ["\n" if i == self.eos_id else self.tokens[i] for i in ids]
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")

    def read_ids(self, blocks: Iterable[Block]) -> Iterator[np.ndarray]:
        ids: dict[str, int] = {}
        for pieces in self.read_pieces(blocks):
            for piece in set(pieces).difference(ids):
                ids[piece] = self.vocabulary.ids.get(self.entry(piece), UNKNOWN)
            yield np.fromiter(map(ids.__getitem__, pieces), np.int64, len(pieces))
