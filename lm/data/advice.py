"""Check whether a text and its vocabulary suit a model, and advise the user."""

import itertools
import re
from collections.abc import Iterator

import numpy as np

from lm import logger
from lm.data.cache import EncodedCorpus
from lm.data.encoding import Encoded
from lm.errors import UserError
from lm.tokens.symbols import Bytes
from lm.tokens.tokenizers import Tokenizer, Words
from lm.tokens.vocabulary import UNK

_BLOCK = 1 << 18  # token IDs
_MANY_WORDS = 400_000  # WikiText-103 has 268,000
# Warn if the head covers less than this fraction of the text that the same number of the most
# frequent words would cover.
_LEAST_OF_HEAD = 0.8
_CLAUSE = re.compile("[\u3040-\u30ff\u3400-\u9fff]{6}")  # Japanese and Chinese characters


def check_known(name: str, encoded: Encoded, tokenizer: Tokenizer, file: str | None = None) -> None:
    """Raise UserError if a text has words outside of a vocabulary that does not contain `<unk>`.

    `file` is the file of the vocabulary if it is not the vocabulary of a run.
    """
    if not encoded.unknown or tokenizer.unk_id is not None:
        return
    words = f"{name} has {encoded.unknown:,} words that are not in"
    if file:
        raise UserError(f"{words} {file}, which does not contain {UNK}: add {UNK} or these words")
    raise UserError(
        f"{words} the run's vocabulary, which does not contain {UNK}; a model trained with"
        " --min_count 2 or --vocab_size knows it, and --new_vocabulary trains further on other"
        " words"
    )


def warn_if_unsorted(ids: np.ndarray, num_words: int, num_head: int) -> None:
    """Warn if frequent words are not in the head of an adaptive softmax, as with --vocabulary."""
    counts = np.zeros(num_words, np.int64)
    for block in _blocks(ids, max(_BLOCK, len(counts))):
        counts += np.bincount(block, minlength=len(counts))
    head, best = counts[:num_head].sum(), np.sort(counts)[-num_head:].sum()
    if head < _LEAST_OF_HEAD * best:
        logger.warning(
            f"the first {num_head:,} words of the vocabulary cover only"
            f" {head / counts.sum():.0%} of the training text, but the {num_head:,} most frequent"
            f" words would cover {best / counts.sum():.0%}: sort the vocabulary by frequency, or"
            " remove adaptive_softmax_cutoffs"
        )


def warn_of_many_words(num_words: int) -> None:
    """Warn if a built vocabulary makes each step slow."""
    if num_words > _MANY_WORDS:
        logger.warning(
            f"the vocabulary has {num_words:,} words, and the memory and time of a step grow with"
            " this number: consider --vocab_size 50000 or --min_count 3"
        )


def warn_without_spaces(encoded: EncodedCorpus) -> bool:
    """Warn if words are clauses in Chinese or Japanese, and return whether they are."""
    tokens = encoded.tokenizer.tokens
    num_clauses = sum(_CLAUSE.search(token) is not None for token in tokens)
    has_no_spaces = encoded.tokenizer.name == Words.name and num_clauses > len(tokens) / 3
    if has_no_spaces:
        logger.warning(
            "the text has no spaces between words, so most words of the vocabulary are clauses: use"
            " --tokenizer characters, or divide the text into words"
        )
    return has_no_spaces


def warn_without_unknown(encoded: EncodedCorpus) -> None:
    """Warn if the training text cannot teach the probability of `<unk>`."""
    unk_id = encoded.tokenizer.unk_id
    if isinstance(encoded.tokenizer, Words) and unk_id is not None:
        ids, size = encoded.ids["train"], len(encoded.tokenizer.tokens)
        if not any((block == unk_id).any() for block in _blocks(ids)):
            blocks = _blocks(ids, max(_BLOCK, size))
            counts = sum(np.bincount(block, minlength=size) for block in blocks)
            counts[[unk_id, encoded.tokenizer.eos_id]] = 0
            rarest = min(counts[counts > 0], default=1)
            logger.warning(
                f"{UNK} never occurs in train, so the model cannot learn its probability: add"
                f" --min_count {rarest + 1}"
            )


def warn_about_single_line(encoded: EncodedCorpus) -> None:
    """Warn if the training text cannot teach the probability of line ends."""
    tokenizer = encoded.tokenizer
    if isinstance(tokenizer, (Words, Bytes)):  # subwords are not scored up to `eos_id`
        blocks = _blocks(encoded.ids["train"])
        counts = (np.count_nonzero(block == tokenizer.eos_id) for block in blocks)
        # `words` adds a line end to a text without line ends.
        if all(count <= 1 for count in itertools.accumulate(counts)):
            logger.warning(
                "train is a single line, so the model cannot learn the probability of line ends,"
                " which lm.score and --lines include: use lm.evaluate without --lines"
            )


def _blocks(ids: np.ndarray, size: int = _BLOCK) -> Iterator[np.ndarray]:
    return (ids[first : first + size] for first in range(0, len(ids), size))
