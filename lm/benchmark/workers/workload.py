"""What every contestant trains on: the same words and the same initial weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Callable, NamedTuple, Optional

import numpy as np

from lm.config import Config
from lm.data.corpus import load_corpus

PTB_VOCAB_SIZE = 10_000
# (inputs [T, B], targets [T, B]) -> (loss, norm of the gradient before clipping)
Step = Callable[[np.ndarray, np.ndarray], tuple[float, float]]
_WINDOWS = 64  # of random words; enough that no contestant could remember them


class Words(NamedTuple):
    """A stream of word ids."""

    ids: np.ndarray  # int32
    vocab_size: int


def load_words(config: Config, max_batch_size: int, data_path: Optional[str]) -> Words:
    """Read a corpus, or make random words that are as frequent as a language's.

    Random words follow Zipf's law, p ~ 1 / rank, because how often a word repeats within a batch
    decides how sparse the embedding's gradient is.

    Args:
      config: The vocabulary's limit, the window and the seed.
      max_batch_size: The largest batch that the stream must fill.
      data_path: Directory of a corpus; None for random words.
    """
    if data_path:
        corpus = load_corpus(data_path, config.vocab_size)
        return Words(corpus.train, len(corpus.vocabulary))
    vocab_size = config.vocab_size or PTB_VOCAB_SIZE
    count = max_batch_size * (_WINDOWS * config.num_steps + 1)
    # The inverse of Zipf's distribution function, continuous: ln(x) is uniform.
    uniform = np.random.default_rng(config.seed).random(count)
    ids = np.exp(uniform * np.log(vocab_size + 1)).astype(np.int32) - 1
    return Words(np.minimum(ids, vocab_size - 1), vocab_size)


def initial_weight(config: Config, name: str, shape: Sequence[int]) -> np.ndarray:
    """Return a weight's first value: uniform in +-init_scale, biases of the LSTM too.

    NumPy makes it, so that contestants in different frameworks can start equal; one at a time,
    so that none needs memory for two copies of all.
    """
    rng = np.random.default_rng([config.seed, zlib.crc32(name.encode())])
    uniform = rng.random(shape, dtype=np.float32)
    uniform *= 2 * config.init_scale
    uniform -= config.init_scale
    return uniform
