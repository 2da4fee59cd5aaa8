"""How well a run predicts each token of a text, and the tokens that it expected instead."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.inference.generator import decode_stream
from lm.inference.trained_run import Run, check_words, open_session
from lm.model import decoding
from lm.model.network import Network

_MAX_EXPECTED = 5


class Prediction(NamedTuple):
    """The prediction of a token."""

    text: str  # the characters that the token completes
    bits: float  # the surprisal: the negative log2-probability
    expected: list[tuple[str, float]]  # the most probable tokens, with their probabilities


class TokenReader:
    """Reads texts one token at a time with the network of a run."""

    def __init__(self, run: Run):
        check_words(run)
        self._tokenizer, self._functions = run.tokenizer, run.functions
        self._session, self._step = open_session(run, self._build)

    def _build(self, network: Network) -> tuple:
        self._state_shape = [1, decoding.state_size(network)]
        self._words_ph = tf.placeholder(tf.int32, [1])
        self._state_ph = tf.placeholder(tf.float32, self._state_shape)
        return decoding.next_word(network, self._words_ph, self._state_ph)

    def predictions(self, ids: Iterable[int]) -> Iterator[Prediction]:
        """Yield a prediction for each token of a text, which starts with an empty state."""
        ids = list(ids)
        state, previous = np.zeros(self._state_shape), self._tokenizer.eos_id
        for token, text in zip(ids, decode_stream(self._tokenizer, ids)):
            log_probs_V, state = self._read(previous, state)
            best = np.argsort(-log_probs_V, kind="stable")[:_MAX_EXPECTED]
            expected = [(self._tokenizer.tokens[each], np.exp(log_probs_V[each])) for each in best]
            yield Prediction(text, -log_probs_V[token] / np.log(2), expected)
            previous = token

    def close(self) -> None:
        self._session.close()

    def _read(self, word: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with self._functions.one_line_errors(running=True):
            feed = {self._words_ph: [word], self._state_ph: state}
            log_probs_1V, state = self._session.run(self._step, feed)
        return log_probs_1V[0].astype(np.float64), state
