"""The vocabulary: selects the words of a model by frequency, and converts words to token IDs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lm.config import Config
from lm.errors import UserError

EOS = "<eos>"  # follows every line
UNK = "<unk>"  # replaces every word that is not in the vocabulary


@dataclass(frozen=True)
class Vocabulary:
    """The words that a model knows. The token ID of a word is its index."""

    words: tuple[str, ...] = field(repr=False)

    def __post_init__(self) -> None:
        for i, word in enumerate(self.words):
            if word.split() != [word]:
                raise UserError(
                    f"word {i + 1} of the vocabulary is empty or contains whitespace: {word!r}"
                )
            if self.ids[word] != i:
                raise UserError(f"word {i + 1} of the vocabulary, {word!r}, is a duplicate")
        if EOS not in self.ids:
            raise UserError(f"the vocabulary does not contain {EOS}")

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], config: Config) -> Vocabulary:
        """Select words and sort them by frequency. Ties are sorted by the word itself.

        The result depends only on the arguments, so that all ranks get the same token IDs. With a
        limit of the config, `<unk>` is in the vocabulary, ranked by its number of occurrences plus
        those of the words that it replaces. `vocab_size` includes `<eos>` and `<unk>`, and
        `min_count` does not apply to them. Without limits, all words are kept. `encode_corpus` in
        lm/data/encoding.py then adds `<unk>` as the last word if valid or test contain unknown
        words.
        """
        counts = {EOS: 0, **counts}
        if config.vocab_size is not None or config.min_count > 1:
            counts.setdefault(UNK, 0)
            words = [word for word in _by_frequency(counts) if word not in (EOS, UNK)]
            num_frequent = sum(counts[word] >= config.min_count for word in words)
            max_words = num_frequent if config.vocab_size is None else config.vocab_size - 2
            for word in words[min(num_frequent, max_words) :]:
                counts[UNK] += counts.pop(word)
        return cls(_by_frequency(counts))

    def __len__(self) -> int:
        return len(self.words)

    @property
    def eos_id(self) -> int:
        return self.ids[EOS]

    @property
    def unk_id(self) -> int | None:
        """The token ID of `<unk>`, or None if the vocabulary contains every word of the corpus."""
        return self.ids.get(UNK)

    @functools.cached_property
    def ids(self) -> Mapping[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    @property
    def sha256(self) -> str:
        """The SHA-256 of the saved file, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, words: Iterable[str]) -> list[int]:
        """Convert words to token IDs. Unknown words get the ID of `<unk>`."""
        words = list(words)
        ids = [self.ids.get(word, self.unk_id) for word in words]
        if None in ids:
            word = words[ids.index(None)]
            raise UserError(
                f"{word!r} is not in the vocabulary, and neither is {UNK}; a model trained with"
                " --min_count 2 or --vocab_size knows it"
            )
        return ids

    @property
    def content(self) -> bytes:
        """The content of the saved file: one word per line."""
        return "".join(f"{word}\n" for word in self.words).encode("utf-8")


def _by_frequency(counts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(counts, key=lambda word: (-counts[word], word)))
