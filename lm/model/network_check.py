"""Check by experiment that the outputs of a network depend on the right inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Callable

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.config_file import BUILT_IN, NetworkFunctions
from lm.data.batches import Rows
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
    """Check that results of a row only depend on that row, and that no output sees later words.

    If a network mixes rows, or depends on the position of a row within a rank, training depends on
    the number of ranks. If a network sees the words that it predicts, its perplexity is
    meaningless. The check warns if single words and windows lead to different results.

    Raises:
      UserError: If the check fails or if the network cannot be built.
    """
    where = functions.where
    steps, random = config.num_steps, np.random.default_rng(config.seed)
    rows = 3 if steps != 3 else 4  # different sizes reveal exchanged axes
    with (
        one_line_errors(functions),
        tf.Graph().as_default(),
        tf.name_scope("lm_check"),  # lm/inference/run.py has a name scope, too
        tf.Session(config=session_config) as session,
    ):
        network = Network(config, vocab_size, functions)
        windows = _Windows(session, network, rows)
        words_ph = tf.placeholder(tf.int32, [None, None])
        by_word = decoding.target_log_probs(network, words_ph, words_ph)  # any B, and T = 1
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        _check_finite(where, session.run(by_word, {words_ph: np.zeros([2, 2])}))
        _replace_zeros(session, random, config.init_scale)
        inputs = random.integers(0, vocab_size, [steps, rows])
        # Check the evaluation first, because in most networks only training draws random numbers.
        for window in (windows.evaluation, windows.training):
            run = partial(windows.run, window)
            _check_window(where, run, inputs, windows.zeros, vocab_size)
        _check_other_rank(where, windows, inputs)
        _compare_words(where, windows, inputs, _read_words(session, network, inputs))


class _Windows:
    """Windows of the network for training, evaluation and a second rank. The state is fed."""

    def __init__(self, session: tf.Session, network: Network, rows: int):
        config, vocab_size, step = network.config, network.vocab_size, tf.constant(0, tf.int64)
        shapes = {name: [rows, *shape] for name, shape in network.state_shapes.items()}
        self._session = session
        self._inputs_ph = tf.placeholder(tf.int32, [config.num_steps, rows])
        self._state_phs = {name: tf.placeholder(tf.float32, shapes[name]) for name in shapes}
        self.zeros: _State = {name: np.zeros(shape) for name, shape in shapes.items()}
        # As in a run, training comes first and creates the variables with their initial values.
        context = Context(config, vocab_size, rows=Rows(0, rows), step=step)
        self.training = network.build(self._inputs_ph, self._state_phs, context)
        context = Context(config, vocab_size, rows=Rows(0, rows))
        self.evaluation = network.build(self._inputs_ph, self._state_phs, context)
        self.ends = [network.log_probs(self.evaluation[0][t], context) for t in (0, -1)]
        # The training window of a rank that has all rows except the first.
        context = Context(config, vocab_size, rows=Rows(1, rows - 1), step=step)
        state = {name: state_ph[1:] for name, state_ph in self._state_phs.items()}
        self.other_rank = network.build(self._inputs_ph[:, 1:], state, context)

    def run(self, window: Any, inputs: np.ndarray, state: _State) -> Any:
        feed = {self._state_phs[name]: value for name, value in state.items()}
        return self._session.run(window, {self._inputs_ph: inputs, **feed})


def _replace_zeros(session: tf.Session, random: np.random.Generator, scale: float) -> None:
    """Replace initial weights of zero, which would hide the values that they are multiplied by."""
    for variable in tf.trainable_variables():
        value = session.run(variable)
        # Use positive values: the network may compute a square root of the weight.
        value = np.where(value == 0, random.uniform(0, scale, value.shape), value)
        session.run(variable.initializer, {variable.initializer.inputs[1]: value})


def _check_window(
    where: str, run: Callable, inputs: np.ndarray, zeros: _State, vocab_size: int
) -> None:
    # Use states that the network computed: other states may be invalid.
    first, state = run(inputs, zeros)
    _, after_others = run((inputs + 1) % vocab_size, zeros)
    top, after = run(inputs, state)
    _check_finite(where, first, *state.values(), top, *after.values())
    if _differ(top, run(inputs, state)[0]):
        raise UserError(
            f"{where} computes different results each time, so its rows cannot be checked: use"
            " context.dropout for all random numbers"
        )
    for row in range(inputs.shape[1]):
        other, other_state = inputs.copy(), {name: value.copy() for name, value in state.items()}
        other[:, row] = (other[:, row] + 1) % vocab_size
        for name, value in other_state.items():
            value[row] = after_others[name][row]
        for what, axis, one, two in _pairs(top, after, *run(other, other_state)):
            if _differ(np.delete(one, row, axis), np.delete(two, row, axis)):
                raise UserError(
                    f"{where}: {what} of a row of the batch depend on another row: the batch is"
                    " axis 1 of the inputs [T, B], and axis 0 of the state"
                )
    for now in range(1, len(inputs)):  # all steps: attention may be limited to blocks of a window
        later = inputs.copy()
        later[now:] = (later[now:] + 1) % vocab_size
        changed, _ = run(later, state)
        if _differ(top[:now], changed[:now]):
            raise UserError(
                f"{where}: the outputs of a time step depend on later words, which the network"
                " must predict"
            )


def _pairs(top: np.ndarray, after: _State, other_top: np.ndarray, other_after: _State) -> list:
    states = [(f"the state {name!r}", 0, after[name], other_after[name]) for name in after]
    return [("the outputs", 1, top, other_top), *states]


def _check_other_rank(where: str, windows: _Windows, inputs: np.ndarray) -> None:
    _, state = windows.run(windows.training, inputs, windows.zeros)
    top, after = windows.run(windows.training, inputs, state)
    other = windows.run(windows.other_rank, inputs, state)
    for what, axis, one, two in _pairs(top, after, *other):
        if _differ(np.delete(one, 0, axis), two, _ROUNDING):
            raise UserError(
                f"{where}: {what} of a row depend on the position of the row within its rank."
                " For dropout, use context.dropout"
            )


def _compare_words(
    where: str, windows: _Windows, inputs: np.ndarray, by_word: Sequence[np.ndarray]
) -> None:
    _, state = windows.run(windows.evaluation, inputs, windows.zeros)
    ends = windows.run(windows.ends, inputs, state)
    for of_window, of_word in zip(ends, by_word):
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
