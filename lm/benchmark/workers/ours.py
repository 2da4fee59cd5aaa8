"""This project's training step, as `lm.train` runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.benchmark.workers.workload import initial_weight
from lm.config import Config
from lm.data.batches import rows_of_rank
from lm.distributed.communicator import Communicator, OneProcess
from lm.model.network import build_weights
from lm.model.shape import weight_shapes
from lm.model.windows import build_model
from lm.training.optimizer import build_update

# (inputs [T, B], targets [T, B]) -> (loss, norm of the gradient before clipping)
Step = Callable[[np.ndarray, np.ndarray], tuple[float, float]]


class StepKey(NamedTuple):
    """Which of a process's steps: one for each global batch, with and without the exchange."""

    batch_size: int
    exchange: bool


def build_steps(
    config: Config,
    vocab_size: int,
    batch_sizes: Sequence[int],
    comm: Communicator,
    session_config: tf.ConfigProto,
) -> dict[StepKey, Step]:
    """Build the training steps of several global batches over shared weights.

    Args:
      config: The model; its own batch_size is not used.
      vocab_size: Number of words.
      batch_sizes: Global batches; each rank trains its share of their rows.
      comm: The ranks.
      session_config: Threads and device.

    Returns:
      Each step under its key; where there is one rank, only with `exchange`.
    """
    with tf.Graph().as_default():
        weights = build_weights(config, vocab_size)
        global_step = tf.train.get_or_create_global_step()
        fetches = {}
        for batch_size in batch_sizes:
            sized = dataclasses.replace(config, batch_size=batch_size)
            fetches.update(_build_fetches(sized, weights, vocab_size, global_step, comm))
        # Finalizes the graph and broadcasts the weights, as in training.
        session = tf.train.SingularMonitoredSession(
            hooks=comm.hooks(), config=session_config
        ).raw_session()
        for variable in tf.trainable_variables():
            name = variable.op.name
            shape = weight_shapes(config, vocab_size)[name]
            variable.load(initial_weight(config, name, shape), session)
    return {key: _step(session, *found) for key, found in fetches.items()}


def _build_fetches(config: Config, weights, vocab_size: int, global_step, comm: Communicator):
    rows = rows_of_rank(config.batch_size, comm.rank, comm.size)
    name = f"batch_{config.batch_size}"
    model = build_model(config, weights, rows, name, dropout_step=global_step)
    ranks = {True: comm, False: OneProcess()} if comm.size > 1 else {True: comm}
    for exchange, each in ranks.items():
        update = build_update(
            config,
            model.loss,
            tf.constant(config.learning_rate),
            global_step,
            vocab_size,
            each,
        )
        loss = each.sum(model.nll_sum, f"{name}/nll_sum") / config.batch_size
        train_op = tf.group(update.train_op, model.keep_state_op)
        yield StepKey(config.batch_size, exchange), (model, [loss, update.grad_norm, train_op])


def _step(session: tf.Session, model, fetches: list) -> Step:
    def step(inputs: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
        feed = {model.inputs_ph: inputs, model.targets_ph: targets}
        loss, grad_norm, _ = session.run(fetches, feed)
        return float(loss), float(grad_norm)

    return step
