"""This project's training step, the very one that `lm.train` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.benchmark.workers.workload import initial_weight
from lm.config import Config
from lm.distributed.communicator import Communicator, OneProcess
from lm.model.network import build_weights
from lm.model.shape import weight_shapes
from lm.training.step import build_step, run_step

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
    built = {}
    with tf.Graph().as_default():
        weights = build_weights(config, vocab_size)
        for batch_size in batch_sizes:
            sized = dataclasses.replace(config, batch_size=batch_size)
            key = StepKey(batch_size, exchange=True)
            built[key] = build_step(sized, weights, comm, f"batch_{batch_size}")
            if comm.size > 1:
                built[key._replace(exchange=False)] = build_step(
                    sized, weights, _WithoutExchange(comm), f"alone_{batch_size}"
                )
        # Finalizes the graph and broadcasts the weights, as in training.
        session = tf.train.SingularMonitoredSession(
            hooks=comm.hooks(), config=session_config
        ).raw_session()
        for variable in tf.trainable_variables():
            name = variable.op.name
            shape = weight_shapes(config, vocab_size)[name]
            variable.load(initial_weight(config, name, shape), session)

    def step_of(key: StepKey) -> Step:
        def step(inputs: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
            result = run_step(session.run, built[key], inputs, targets, config.learning_rate)
            return result.nll.nats / key.batch_size, result.grad_norm

        return step

    return {key: step_of(key) for key in built}


class _WithoutExchange(OneProcess):
    """A rank that trains its share of the rows, and exchanges nothing."""

    def __init__(self, comm: Communicator):
        self.rank, self.size = comm.rank, comm.size
