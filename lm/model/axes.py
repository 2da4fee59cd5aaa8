"""A check of a network by experiment: what its outputs depend on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Callable, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.config_file import ConfigFile
from lm.data.batches import Rows
from lm.errors import UserError
from lm.model import stepwise
from lm.model.context import Context
from lm.model.guard import one_line
from lm.model.network import Network

_State = Mapping[str, np.ndarray]
_TOLERANCE = 1e-5  # of the largest number; mostly every bit is the same


def check_axes(
    config: Config,
    vocab_size: int,
    file: Optional[ConfigFile],
    session_config: Optional[tf.ConfigProto] = None,
) -> None:
    """Check that each row's numbers depend on that row alone, and no output on a later word.

    A network that mixes rows up trains something else on each number of ranks. One that sees the
    words that it is to predict has a perplexity that means nothing. All uses of the network are
    built, also those that come after days of training.

    Args:
      config: Sizes.
      vocab_size: Words.
      file: The config file, which may bring the network.
      session_config: Threads and device.

    Raises:
      UserError: They depend on more, or the network cannot be used; the message says where.
    """
    where = file.path if file else "the built-in network"
    steps, random = config.num_steps, np.random.default_rng(config.seed)
    rows = 3 if steps != 3 else 4  # axes that can be told from each other
    with (
        one_line(file),
        tf.Graph().as_default(),
        tf.name_scope("lm_check"),  # as in lm/inference/session.py
        tf.Session(config=session_config) as session,
    ):
        network, step = Network(config, vocab_size, file), tf.constant(0, tf.int64)
        inputs_ph = tf.placeholder(tf.int32, [steps, rows])
        shapes = {name: [rows, *shape] for name, shape in network.state_shapes.items()}
        state_phs = {name: tf.placeholder(tf.float32, shape) for name, shape in shapes.items()}
        # As in a run, training comes first: it makes the variables with their initial values.
        windows = [
            network.run(
                inputs_ph,
                state_phs,
                Context(config, vocab_size, rows=Rows(0, rows), step=dropout_step),
            )
            for dropout_step in (step, None)
        ]
        words_ph = tf.placeholder(tf.int32, [None, None])
        by_word = stepwise.target_log_probs(network, words_ph, words_ph)  # any B, and T of 1
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        _check_finite(where, session.run(by_word, {words_ph: np.zeros([2, 2])}))
        inputs = random.integers(0, vocab_size, [steps, rows])
        zeros = {name: np.zeros(shape) for name, shape in shapes.items()}

        def run(window: tuple, inputs: np.ndarray, state: _State) -> tuple[np.ndarray, _State]:
            feed = {inputs_ph: inputs, **{state_phs[name]: state[name] for name in state}}
            return session.run(window, feed)

        for window in reversed(windows):  # random numbers are mostly of training alone
            _check_window(where, partial(run, window), inputs, zeros, vocab_size)


def _check_window(
    where: str, run: Callable, inputs: np.ndarray, zeros: _State, vocab_size: int
) -> None:
    first, state = run(inputs, zeros)  # a state that occurs: others may be none to the network
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
        for value in other_state.values():
            value[row] += 1
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


def _check_finite(where: str, *found: np.ndarray) -> None:
    if not all(np.isfinite(value).all() for value in found):
        raise UserError(f"{where}: with its first weights, not all that it computes is finite")


def _differ(first: np.ndarray, second: np.ndarray) -> bool:
    close = _TOLERANCE * np.abs(first).max(initial=0)
    return bool(first.size and not np.abs(first - second).max() <= close)  # true for NaN
