"""The inputs that all implementations share: token IDs and initial weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lm.config import Config
from lm.data.corpus import load_corpus

_PTB_VOCAB_SIZE = 10_000
_WINDOWS = 64  # windows of random words


class StepResult(NamedTuple):
    """Results of one training step."""

    loss: float  # summed over time, averaged over rows
    grad_norm: float  # before clipping
    exchange_seconds: float = 0.0  # time in the gradient exchange


# A training step on inputs [T, B] and targets [T, B], both int32.
Step = Callable[[np.ndarray, np.ndarray], StepResult]


def load_words(config: Config, data_path: str | None) -> tuple[np.ndarray, int]:
    """Load a corpus, or draw random words with the frequencies of a language.

    Random words follow Zipf's law, p ~ 1 / rank. Repeated words within a batch determine how
    sparse the gradient of the embedding is.

    Args:
      config: The vocabulary limit, the batch and the seed.
      data_path: Directory of a corpus, or None for random words.

    Returns:
      The token IDs of the training split, int32, and the size of the vocabulary.
    """
    if data_path:
        corpus = load_corpus(data_path, config.vocab_size)
        return corpus.train, len(corpus.vocabulary)
    vocab_size = config.vocab_size or _PTB_VOCAB_SIZE
    count = config.batch_size * (_WINDOWS * config.num_steps + 1)
    # Inverse of the continuous distribution function: ln(x) is uniform.
    uniform = np.random.default_rng(config.seed).random(count)
    ids = np.exp(uniform * np.log(vocab_size + 1)).astype(np.int32) - 1
    return np.minimum(ids, vocab_size - 1), vocab_size


def initial_weight(config: Config, name: str, shape: Sequence[int]) -> np.ndarray:
    """Return the initial value of a weight, uniform in +-init_scale, also for LSTM biases.

    NumPy draws it, so that implementations in different frameworks start with equal weights.
    """
    rng = np.random.default_rng([config.seed, zlib.crc32(name.encode())])
    uniform = rng.random(shape, dtype=np.float32)
    uniform *= 2 * config.init_scale
    uniform -= config.init_scale
    return uniform
