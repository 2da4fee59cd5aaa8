"""A check of a network by experiment: what its outputs depend on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Callable, Optional

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
_TOLERANCE = 1e-5  # of a unit's largest number; mostly every bit is the same
# Where other shapes sum in another order. What is computed otherwise differs in the first digits.
_ROUNDING = 1e-2
_LEAST_NATS = 1e-5  # what float32 rounds of a log-probability


def check_network(
    config: Config,
    vocab_size: int,
    functions: NetworkFunctions = BUILT_IN,
    session_config: Optional[tf.ConfigProto] = None,
) -> None:
    """Check that each row's numbers depend on that row alone, and no output on a later word.

    A network that mixes rows up, or goes by a row's place in the share of a rank, trains something
    else on each number of ranks. One that sees the words that it is to predict has a perplexity
    that means nothing. All uses of the network are built, also those that come after days of
    training; one that reads single words otherwise than windows is warned of.

    Args:
      config: Sizes.
      vocab_size: Words.
      functions: The functions of the network.
      session_config: Threads and device.

    Raises:
      UserError: They depend on more, or the network cannot be used; the message says where.
    """
    where = functions.where
    steps, random = config.num_steps, np.random.default_rng(config.seed)
    rows = 3 if steps != 3 else 4  # axes that can be told from each other
    with (
        one_line_errors(functions),
        tf.Graph().as_default(),
        tf.name_scope("lm_check"),  # as in lm/inference/session.py
        tf.Session(config=session_config) as session,
    ):
        network = Network(config, vocab_size, functions)
        windows = _Windows(session, network, rows)
        words_ph = tf.placeholder(tf.int32, [None, None])
        by_word = decoding.target_log_probs(network, words_ph, words_ph)  # any B, and T of 1
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        _check_finite(where, session.run(by_word, {words_ph: np.zeros([2, 2])}))
        _leave_zero(session, random, config.init_scale)
        inputs = random.integers(0, vocab_size, [steps, rows])
        for window in (windows.evaluation, windows.training):  # mostly this alone draws numbers
            _check_window(where, partial(windows.run, window), inputs, windows.zeros, vocab_size)
        _check_share(where, windows, inputs)
        _check_words(where, windows, inputs, _read(session, network, inputs))


class _Windows:
    """The uses of a network for windows, with their state fed."""

    def __init__(self, session: tf.Session, network: Network, rows: int):
        config, vocab_size, step = network.config, network.vocab_size, tf.constant(0, tf.int64)
        shapes = {name: [rows, *shape] for name, shape in network.state_shapes.items()}
        self._session = session
        self._inputs_ph = tf.placeholder(tf.int32, [config.num_steps, rows])
        self._state_phs = {name: tf.placeholder(tf.float32, shapes[name]) for name in shapes}
        self.zeros: _State = {name: np.zeros(shape) for name, shape in shapes.items()}
        # As in a run, training comes first: it makes the variables with their initial values.
        context = Context(config, vocab_size, rows=Rows(0, rows), step=step)
        self.training = network.build(self._inputs_ph, self._state_phs, context)
        context = Context(config, vocab_size, rows=Rows(0, rows))
        self.evaluation = network.build(self._inputs_ph, self._state_phs, context)
        self.ends = [network.log_probs(self.evaluation[0][t], context) for t in (0, -1)]
        # What a rank trains that has all rows but the first.
        context = Context(config, vocab_size, rows=Rows(1, rows - 1), step=step)
        state = {name: state_ph[1:] for name, state_ph in self._state_phs.items()}
        self.share = network.build(self._inputs_ph[:, 1:], state, context)

    def run(self, window: Any, inputs: np.ndarray, state: _State) -> Any:
        """Return the values of tensors of a window."""
        feed = {self._state_phs[name]: value for name, value in state.items()}
        return self._session.run(window, {self._inputs_ph: inputs, **feed})


def _leave_zero(session: tf.Session, random: np.random.Generator, scale: float) -> None:
    """Change the weights that start at zero: what they are multiplied by would not be seen."""
    for variable in tf.trainable_variables():
        value = session.run(variable)
        # None below zero: there may be a root of them.
        value = np.where(value == 0, random.uniform(0, scale, value.shape), value)
        session.run(variable.initializer, {variable.initializer.inputs[1]: value})


def _check_window(
    where: str, run: Callable, inputs: np.ndarray, zeros: _State, vocab_size: int
) -> None:
    first, state = run(inputs, zeros)  # a state that occurs: others may be none to the network
    _, after_others = run((inputs + 1) % vocab_size, zeros)
    top, after = run(inputs, state)
    _check_finite(where, first, *state.values(), top, *after.values())
    if _differ(top, run(inputs, state)[0]):
        raise UserError(
            f"{where} computes other numbers each time, so its rows cannot be checked: draw random"
            " ones with context.dropout only"
        )
    for row in range(inputs.shape[1]):
        other, other_state = inputs.copy(), {name: value.copy() for name, value in state.items()}
        other[:, row] = (other[:, row] + 1) % vocab_size
        for name, value in other_state.items():
            value[row] = after_others[name][row]
        changed, changed_after = run(other, other_state)
        pairs = [("the outputs", 1, top, changed)]
        pairs += [(f"the state {n!r}", 0, after[n], changed_after[n]) for n in after]
        for what, axis, *both in pairs:
            if _differ(*(np.delete(value, row, axis) for value in both)):
                raise UserError(
                    f"{where}: {what} of a row of the batch depend on another row: the batch is"
                    " axis 1 of the inputs [T, B], and axis 0 of the state"
                )
    for now in range(1, len(inputs)):  # each of them: attention may be within blocks of the window
        later = inputs.copy()
        later[now:] = (later[now:] + 1) % vocab_size
        changed, _ = run(later, state)
        if _differ(top[:now], changed[:now]):
            raise UserError(
                f"{where}: the outputs of a time step depend on later words, which it is to predict"
            )


def _check_share(where: str, windows: _Windows, inputs: np.ndarray) -> None:
    _, state = windows.run(windows.training, inputs, windows.zeros)
    top, after = windows.run(windows.training, inputs, state)
    top_of_share, after_of_share = windows.run(windows.share, inputs, state)
    pairs = [("the outputs", top[:, 1:], top_of_share)]
    pairs += [(f"the state {name!r}", after[name][1:], after_of_share[name]) for name in after]
    for what, *both in pairs:
        if _differ(*both, _ROUNDING):
            raise UserError(
                f"{where}: {what} of a row depend on its place among the rows of a rank, which is"
                " another one on each number of ranks; for dropout use context.dropout"
            )


def _check_words(
    where: str, windows: _Windows, inputs: np.ndarray, by_word: Sequence[np.ndarray]
) -> None:
    _, state = windows.run(windows.evaluation, inputs, windows.zeros)
    ends = windows.run(windows.ends, inputs, state)
    for of_window, of_word in zip(ends, by_word):
        # From their mean, about -log V: what they say of the words, small as first weights are.
        of_window, of_word = (x - x.mean(axis=1, keepdims=True) for x in (of_window, of_word))
        if _differ(of_window, of_word, _ROUNDING, floor=_LEAST_NATS):
            logger.warning(
                "%s reads single words otherwise than windows of %d: lm.score, lm.generate and"
                " lm.export will be another model than lm.evaluate; what a word may see of those"
                " before it must pass through the state",
                where,
                len(inputs),
            )
            return


def _read(session: tf.Session, network: Network, words_TB: np.ndarray) -> list:
    """Read a window twice, a word at a time; returns what follows the first and the last word of
    the second one, as log-probabilities."""
    (steps, rows), size = words_TB.shape, decoding.state_size(network)
    word_ph, state_ph = tf.placeholder(tf.int32, [rows]), tf.placeholder(tf.float32, [rows, size])
    step = decoding.next_word(network, word_ph, state_ph)
    found, state = [], np.zeros([rows, size])
    for read, words in enumerate([*words_TB, *words_TB], start=1):
        log_probs, state = session.run(step, {word_ph: words, state_ph: state})
        if read in (steps + 1, 2 * steps):
            found.append(log_probs)
    return [found[0], found[-1]]  # of one time step these are the same


def _check_finite(where: str, *found: np.ndarray) -> None:
    for value in found:
        if not (value < np.inf).all():  # NaN neither; -inf, a probability of 0, is a number here
            raise UserError(f"{where}: with its first weights, not all that it computes is finite")


def _differ(
    first: np.ndarray, second: np.ndarray, tolerance: float = _TOLERANCE, floor: float = 0.0
) -> bool:
    if not first.size:
        return False
    # By unit, a place of the last axis: one of large numbers must not hide the others.
    sizes = np.where(np.isfinite(first), np.abs(first), 0).max(axis=tuple(range(first.ndim - 1)))
    close = np.maximum(tolerance * np.maximum(sizes, np.median(sizes)), floor)
    with np.errstate(invalid="ignore"):  # of equal infinities
        return not ((first == second) | (np.abs(first - second) <= close)).all()  # true for NaN
