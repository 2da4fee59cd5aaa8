"""A check of a network by experiment: what its outputs depend on."""

from __future__ import annotations

from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.config_file import ConfigFile
from lm.data.batches import Rows
from lm.errors import UserError
from lm.model.context import Context
from lm.model.guard import one_line
from lm.model.network import Network

_TOLERANCE = 1e-5  # of the largest number; mostly every bit is the same


def check_axes(
    config: Config,
    vocab_size: int,
    file: Optional[ConfigFile],
    session_config: Optional[tf.ConfigProto] = None,
) -> None:
    """Check that each row's numbers depend on that row alone, and no output on a later word.

    A network that mixes rows up trains something else on each number of ranks. One that sees the
    words that it is to predict has a perplexity that means nothing.

    Args:
      config: Sizes.
      vocab_size: Words.
      file: The config file, which may bring the network.
      session_config: Threads and device.

    Raises:
      UserError: They depend on more; the message says where.
    """
    for training in (False, True):
        with one_line(file):
            _check_use(config, vocab_size, file, session_config, training)


def _check_use(
    config: Config,
    vocab_size: int,
    file: Optional[ConfigFile],
    session_config: Optional[tf.ConfigProto],
    training: bool,
) -> None:
    steps, random = config.num_steps, np.random.default_rng(config.seed)
    rows = 3 if steps != 3 else 4  # axes that can be told from each other
    where = file.path if file else "the built-in network"
    with tf.Graph().as_default(), tf.Session(config=session_config) as session:
        network, step = Network(config, vocab_size, file), tf.constant(0, tf.int64)
        inputs_ph = tf.placeholder(tf.int32, [steps, rows])
        shapes = {name: [rows, *shape] for name, shape in network.state_shapes.items()}
        state_phs = {name: tf.placeholder(tf.float32, shape) for name, shape in shapes.items()}
        context = Context(config, vocab_size, training, rows=Rows(0, rows), step=step)
        built = network.run(inputs_ph, state_phs, context)
        session.run(tf.global_variables_initializer())

        def run(inputs: np.ndarray, state: dict[str, np.ndarray]):
            feed = {inputs_ph: inputs, **{state_phs[name]: state[name] for name in state}}
            return session.run(built, feed)

        inputs = random.integers(0, vocab_size, [steps, rows])
        state = {name: random.normal(size=shape) for name, shape in shapes.items()}
        top, after = run(inputs, state)
        if _differ(top, run(inputs, state)[0]):
            return  # random numbers of its own, of which `Network.run` has warned
        other, other_state = inputs.copy(), {name: value.copy() for name, value in state.items()}
        other[:, 0] = (other[:, 0] + 1) % vocab_size
        for value in other_state.values():
            value[0] += 1
        changed, changed_after = run(other, other_state)
        pairs = [("the outputs", top[:, 1:], changed[:, 1:])]
        pairs += [(f"the state {n!r}", after[n][1:], changed_after[n][1:]) for n in after]
        for what, first, second in pairs:
            if _differ(first, second):
                raise UserError(
                    f"{where}: {what} of a row of the batch depend on another row: the batch is"
                    " axis 1 of the inputs [T, B], and axis 0 of the state"
                )
        later = inputs.copy()
        later[steps // 2 :] = (later[steps // 2 :] + 1) % vocab_size
        changed, _ = run(later, state)
        if _differ(top[: steps // 2], changed[: steps // 2]):
            raise UserError(
                f"{where}: the outputs of a time step depend on later words, which it is to predict"
            )


def _differ(first: np.ndarray, second: np.ndarray) -> bool:
    return bool(first.size and np.abs(first - second).max() > _TOLERANCE * np.abs(first).max())
