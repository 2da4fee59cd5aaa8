"""Check by experiment that the outputs of a network do not depend on later words."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.config_file import BUILT_IN, NetworkFunctions
from lm.errors import UserError
from lm.model import decoding
from lm.model.context import Context
from lm.model.network import Network
from lm.model.user_errors import one_line_errors

logger = logging.getLogger("lm")

_State = Mapping[str, np.ndarray]
_TOLERANCE = 1e-5  # relative to the largest number of a unit; most results are bitwise identical
_ROUNDING = 1e-2  # if shapes, and therefore summation orders, differ; mistakes differ more
_MIN_NATS = 1e-5  # the rounding of a log-probability in float32


def check_network(
    config: Config,
    vocab_size: int,
    functions: NetworkFunctions = BUILT_IN,
    session_config: tf.ConfigProto | None = None,
) -> None:
    """Check that no output sees later words and that results are finite and reproducible.

    If a network sees the words that it predicts, its perplexity is meaningless. The check warns if
    single words and windows lead to different results.

    Raises:
      UserError: If the check fails or if the network cannot be built.
    """
    where, random = functions.where, np.random.default_rng(config.seed)
    with (
        one_line_errors(functions),
        tf.Graph().as_default(),
        tf.name_scope("lm_check"),  # lm/inference/run.py has a name scope, too
        tf.Session(config=session_config) as session,
    ):
        network = Network(config, vocab_size, functions)
        window = _Window(session, network)
        words_ph = tf.placeholder(tf.int32, [None, None])
        by_word = decoding.target_log_probs(network, words_ph, words_ph)  # any B, and T = 1
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        _check_finite(where, session.run(by_word, {words_ph: np.zeros([2, 2])}))
        _replace_zeros(session, random, config.init_scale)
        inputs = random.integers(0, vocab_size, window.shape)
        _check_window(where, window, inputs, vocab_size)
        # Generation and scoring process single rows.
        _compare_words(where, window, inputs, _read_words(session, network, inputs[:, :1]))


class _Window:
    """An evaluation window of the network, [num_steps, 2]. The state is fed."""

    def __init__(self, session: tf.Session, network: Network):
        self.shape = [network.config.num_steps, 2]
        shapes = {name: [2, *shape] for name, shape in network.state_shapes.items()}
        self._session = session
        self._inputs_ph = tf.placeholder(tf.int32, self.shape)
        self._state_phs = {name: tf.placeholder(tf.float32, shapes[name]) for name in shapes}
        self.zeros: _State = {name: np.zeros(shape) for name, shape in shapes.items()}
        context = Context(network.config, network.vocab_size, num_rows=2)
        self.results = network.build(self._inputs_ph, self._state_phs, context)
        self.ends = [network.log_probs(self.results[0][t], context) for t in (0, -1)]

    def run(self, fetches: Any, inputs: np.ndarray, state: _State) -> Any:
        feed = {self._state_phs[name]: value for name, value in state.items()}
        return self._session.run(fetches, {self._inputs_ph: inputs, **feed})


def _replace_zeros(session: tf.Session, random: np.random.Generator, scale: float) -> None:
    """Replace initial weights of zero, which would hide the values that they are multiplied by."""
    for variable in tf.trainable_variables():
        value = session.run(variable)
        # Use positive values: the network may compute a square root of the weight.
        value = np.where(value == 0, random.uniform(0, scale, value.shape), value)
        session.run(variable.initializer, {variable.initializer.inputs[1]: value})


def _check_window(where: str, window: _Window, inputs: np.ndarray, vocab_size: int) -> None:
    # Use a state that the network computed: other states may be invalid.
    first, state = window.run(window.results, inputs, window.zeros)
    top, after = window.run(window.results, inputs, state)
    _check_finite(where, first, *state.values(), top, *after.values())
    if _differ(top, window.run(window.results, inputs, state)[0]):
        raise UserError(
            f"{where} computes different results each time, so it cannot be checked: use"
            " context.dropout or context.seed() for all random numbers"
        )
    for now in range(1, len(inputs)):  # all steps: attention may be limited to blocks of a window
        later = inputs.copy()
        later[now:] = (later[now:] + 1) % vocab_size
        changed, _ = window.run(window.results, later, state)
        if _differ(top[:now], changed[:now]):
            raise UserError(
                f"{where}: the outputs of a time step depend on later words, which the network"
                " must predict"
            )


def _compare_words(
    where: str, window: _Window, inputs: np.ndarray, by_word: Sequence[np.ndarray]
) -> None:
    _, state = window.run(window.results, inputs, window.zeros)
    ends = window.run(window.ends, inputs, state)
    for of_window, of_word in zip((end[:1] for end in ends), by_word):
        # Subtract the mean, about -log V, which is large compared to the effect of initial weights.
        of_window, of_word = (x - x.mean(axis=1, keepdims=True) for x in (of_window, of_word))
        if _differ(of_window, of_word, _ROUNDING, floor=_MIN_NATS):
            logger.warning(
                "%s computes different results for single words and for windows of %d, so lm.score,"
                " lm.generate and lm.export will differ from lm.evaluate; use the state for all"
                " information about previous words",
                where,
                len(inputs),
            )
            return


def _read_words(session: tf.Session, network: Network, words_TB: np.ndarray) -> list[np.ndarray]:
    """Read a window twice, one word at a time, and return both ends of the second pass."""
    (steps, rows), size = words_TB.shape, decoding.state_size(network)
    word_ph, state_ph = tf.placeholder(tf.int32, [rows]), tf.placeholder(tf.float32, [rows, size])
    step = decoding.next_word(network, word_ph, state_ph)
    found, state = [], np.zeros([rows, size])
    for words in [*words_TB, *words_TB]:
        log_probs, state = session.run(step, {word_ph: words, state_ph: state})
        found.append(log_probs)
    return [found[steps], found[-1]]


def _check_finite(where: str, *found: np.ndarray) -> None:
    for value in found:
        if not (value < np.inf).all():  # false for NaN; -inf is the logarithm of a probability of 0
            raise UserError(f"{where}: with its initial weights, not all results are finite")


def _differ(
    first: np.ndarray, second: np.ndarray, tolerance: float = _TOLERANCE, floor: float = 0.0
) -> bool:
    if not first.size:
        return False
    # Compare each unit (index of the last axis) on the scale of this unit, but small units on the
    # median scale: a unit with large numbers must not hide the differences of small units.
    sizes = np.where(np.isfinite(first), np.abs(first), 0).max(axis=tuple(range(first.ndim - 1)))
    close = np.maximum(tolerance * np.maximum(sizes, np.median(sizes)), floor)
    with np.errstate(invalid="ignore"):  # differences of equal infinities
        return not ((first == second) | (np.abs(first - second) <= close)).all()  # true for NaN
