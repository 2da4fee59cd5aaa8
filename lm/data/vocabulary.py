"""Words to ids and back."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lm.errors import UserError
from lm.files import write_atomically

EOS = "<eos>"  # stands at the end of every line
UNK = "<unk>"  # stands for every word that is not in the vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """The words that a model knows; a word's id is its place.

    Args:
      words: Distinct, without white space, `<eos>` among them.

    Raises:
      UserError: The words break one of these rules.
    """

    words: tuple[str, ...] = field(repr=False)

    def __post_init__(self) -> None:
        for i, word in enumerate(self.words):
            if word.split() != [word]:
                raise UserError(
                    f"word {i + 1} of the vocabulary is empty or has white space: {word!r}"
                )
            if self.ids[word] != i:
                raise UserError(f"word {i + 1} of the vocabulary, {word!r}, is there twice")
        if EOS not in self.ids:
            raise UserError(f"the vocabulary has no {EOS}")

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], vocab_size: int | None = None) -> Vocabulary:
        """Choose and order words by how often they occur, ties by the word itself.

        Nothing else decides (no hash order, no locale), so every rank gets the same ids.

        Args:
          counts: Word -> occurrences in the training text.
          vocab_size: Keep so many words at most, the most frequent; `<eos>` and `<unk>` are
              among them. None keeps every word, and adds no `<unk>` if the text has none.
        """
        always = {EOS} if vocab_size is None else {EOS, UNK}
        assert vocab_size is None or vocab_size >= len(always)

        def by_frequency(word: str) -> tuple[int, str]:
            return -counts.get(word, 0), word

        words = sorted(set(counts) - always, key=by_frequency)
        if vocab_size is not None:
            words = words[: vocab_size - len(always)]
        return cls(tuple(sorted(always.union(words), key=by_frequency)))

    def __len__(self) -> int:
        return len(self.words)

    @property
    def eos_id(self) -> int:
        """The id of `<eos>`."""
        return self.ids[EOS]

    @property
    def unk_id(self) -> int | None:
        """The id of `<unk>`, or None where every word of the corpus is known."""
        return self.ids.get(UNK)

    @functools.cached_property
    def ids(self) -> Mapping[str, int]:
        """The id of each word; for loops over many words, where one call per word is too slow."""
        return {word: i for i, word in enumerate(self.words)}

    @property
    def checksum(self) -> str:
        """The SHA-256 of the saved file, as 64 hexadecimal digits."""
        return hashlib.sha256(self._saved()).hexdigest()

    def id_of(self, word: str) -> int:
        """Look up a word; an unknown one gets the id of `<unk>`.

        Raises:
          UserError: The word is unknown and the vocabulary has no `<unk>`.
        """
        found = self.ids.get(word, self.unk_id)
        if found is None:
            raise UserError(f"{word!r} is not in the vocabulary, which has no {UNK} either")
        return found

    def encode(self, words: Iterable[str]) -> list[int]:
        """Turn words into ids, as `id_of` does."""
        return [self.id_of(word) for word in words]

    def save(self, path: str) -> None:
        """Write one word per line, in the order of the ids.

        Raises:
          OSError: The file cannot be written.
        """
        write_atomically(path, self._saved())

    @classmethod
    def load(cls, path: str) -> Vocabulary:
        """Read what `save` wrote.

        Raises:
          UserError: The file cannot be read or does not hold a vocabulary.
        """
        try:
            with open(path, "rb") as file:
                text = file.read().decode("utf-8")
            if not text.endswith("\n"):
                raise UserError("the last line is cut off")
            return cls(tuple(text[:-1].split("\n")))
        except OSError as error:
            raise UserError(f"cannot read the vocabulary {path}: {error.strerror}") from error
        except ValueError as error:  # UserError and UnicodeDecodeError are both ValueErrors
            raise UserError(f"{path} does not hold a vocabulary: {error}") from error

    def _saved(self) -> bytes:
        return "".join(f"{word}\n" for word in self.words).encode("utf-8")
