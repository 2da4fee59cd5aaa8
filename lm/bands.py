"""The bands of an adaptive softmax: the words of the head, and the words of each cluster.

This module does not import TensorFlow, because the peers of the benchmark use it too.
"""

import itertools

from lm.config import Config


def cutoffs_of(config: Config) -> tuple[int, ...]:
    """Return the token ID of the first word of each cluster, or () for a full softmax."""
    return tuple(map(int, filter(None, config.adaptive_softmax_cutoffs.split(","))))


def band_shapes(config: Config, units: int, vocab_size: int) -> list[list[int]]:
    """Return the shape [W, K] of the head's words, and of the words of each cluster.

    `units` are the units of the head.
    """
    edges = itertools.pairwise((0, *cutoffs_of(config), vocab_size))
    return [
        [end - first, max(units // config.adaptive_softmax_factor**band, 1)]
        for band, (first, end) in enumerate(edges)
    ]
