"""Advice about texts that are valid, but that probably do not contain what the user expects."""

import contextlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from lm.data.tokenizers import Ids, Tokenizer, Words
from lm.data.vocabulary import EOS, UNK
from lm.errors import UserError

_BLOCK = 1 << 18  # token IDs
_UNKNOWN_CHARACTER = "\U000f0000"  # for private use
_LEAST_TOKENS = 100  # of a split
_MOST_CHARACTERS = 200  # of a word
_MOST_EMPTY_LINES = 0.05  # of the tokens


def advice(tokenizer: Tokenizer, splits: Mapping[str, np.ndarray]) -> list[str]:
    """Return one sentence for each suspicious fact of a corpus, given its token IDs by split."""
    found = [sentence for split, ids in splits.items() for sentence in _about_size(split, ids)]
    if type(tokenizer) is Words:
        return [*found, *_about_text(tokenizer, splits)]
    return [*found, *_about_tokenizer(tokenizer)]


def _about_tokenizer(tokenizer: Tokenizer) -> Iterator[str]:
    if isinstance(tokenizer, Words | Ids) or tokenizer.unk_id is not None:
        return
    with contextlib.suppress(UserError):  # Some tokenizers reject unknown characters.
        if not tokenizer.encode(_UNKNOWN_CHARACTER):
            yield (
                "the tokenizer drops characters that it does not know, so bits per byte may be too"
                " low: use a tokenizer that has an unknown token or the 256 bytes"
            )


def _about_text(words: Words, splits: Mapping[str, np.ndarray]) -> Iterator[str]:
    yield from _about_words(words.tokens)
    unk_id = words.unk_id
    if unk_id is not None and not any((ids == unk_id).any() for ids in _blocks(splits["train"])):
        yield (
            f"{UNK} never occurs in train, so the model cannot learn its probability: add"
            " --min_count 2 or --vocab_size"
        )
    for split, ids in splits.items():
        yield from _about_empty_lines(split, ids, words.eos_id)


def _blocks(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yield small parts of a mapped array, each of which includes the first ID of the next part."""
    for first in range(0, len(ids), _BLOCK):
        yield ids[first : first + _BLOCK + 1]


def _about_words(words: Iterable[str]) -> Iterator[str]:
    """Yield advice about the first word of each kind."""
    kinds = {
        "contains U+FEFF, a byte order mark: remove it, as in sed 's/\\xef\\xbb\\xbf//g'":
            lambda word: "\ufeff" in word,
        "contains a control character: remove control characters":
            lambda word: any(unicodedata.category(c) == "Cc" for c in word),
        f"has more than {_MOST_CHARACTERS} characters: words must be separated by spaces":
            lambda word: len(word) > _MOST_CHARACTERS,
        f"is an ordinary word: write {UNK} if it stands for unknown words":
            lambda word: word != UNK and word.lower().strip("<>[]") == "unk",
    }  # fmt: skip
    for problem, has in kinds.items():
        for word in words:
            if has(word):
                yield f"the word {word[:40]!r} {problem}"
                break


def _about_size(split: str, ids: np.ndarray) -> Iterator[str]:
    if len(ids) < _LEAST_TOKENS:
        yield f"{split} has only {len(ids)} tokens: its perplexity says little"


def _about_empty_lines(split: str, ids: np.ndarray, eos_id: int) -> Iterator[str]:
    num_empty = 0
    for is_eos in (block == eos_id for block in _blocks(ids)):
        num_empty += int(np.count_nonzero(is_eos[1:] & is_eos[:-1]))
    if num_empty > _MOST_EMPTY_LINES * len(ids):
        yield (
            f"{num_empty / len(ids):.0%} of the tokens of {split} are the {EOS} of empty lines:"
            " remove these lines, for example with sed '/^ *$/d'"
        )
