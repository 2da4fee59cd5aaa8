"""Draws of tokens, and short samples of text during the training."""

from collections.abc import Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm.model import decoding
from lm.model.network import Network

_NUM_TOKENS = 30


class Sampler:
    """Draws texts with the current weights. The training graph must be the default graph."""

    def __init__(self, network: Network, eos_id: int):
        self._eos_id = eos_id
        with tf.name_scope("lm_sample"):
            self._token_ph = tf.placeholder(tf.int32, [1])
            self._state_ph = tf.placeholder(tf.float32, [1, decoding.state_size(network)])
            self._next = decoding.next_word(network, self._token_ph, self._state_ph)

    def draw(self, session: tf.Session, seed: Sequence[int]) -> list[int]:
        """Return the token IDs of a text. The training does not use these random numbers."""
        random = np.random.Generator(np.random.PCG64(seed)).random
        tokens, state = [self._eos_id], np.zeros(self._state_ph.shape.as_list())
        while len(tokens) <= _NUM_TOKENS:
            feed = {self._token_ph: tokens[-1:], self._state_ph: state}
            log_probs_1V, state = session.run(self._next, feed)
            tokens.append(draw(np.exp(log_probs_1V[0], dtype=np.float64), random()))
        return tokens[1:]


def draw(probabilities_V: np.ndarray, random: float) -> int:
    """Return the ID of a token with a positive probability, given a random number in [0, 1)."""
    cumulative = np.cumsum(probabilities_V)
    # Rounding may leave the sum below 1. The scaled random number always selects a token.
    token = np.searchsorted(cumulative, random * cumulative[-1], side="right")
    # If the probabilities are NaN, which the next training step reports, the index is too large.
    return min(int(token), len(cumulative) - 1)
