"""This project's training step, the very one that `lm.train` runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm.benchmark.workers.workload import Step, initial_weight
from lm.config import Config
from lm.config_file import NetworkFunctions
from lm.distributed.communicator import Communicator, OneProcess
from lm.model.network import Network
from lm.model.user_errors import one_line_errors
from lm.training.step import build_step, run_step


def build_steps(
    config: Config,
    functions: NetworkFunctions,
    vocab_size: int,
    batch_sizes: Sequence[int],
    comm: Communicator,
    session_config: tf.ConfigProto,
) -> dict[tuple[int, bool], Step]:
    """Build the training steps of several global batches over shared weights.

    Args:
      config: The model; its own batch_size is not used.
      functions: The functions of the network.
      vocab_size: Number of words.
      batch_sizes: Global batches; each rank trains its share of their rows.
      comm: The ranks.
      session_config: Threads and device.

    Returns:
      Each step under its global batch and whether it exchanges; where there is one rank, all do.
    """
    built = {}
    with tf.Graph().as_default():
        for batch_size in batch_sizes:
            sized = dataclasses.replace(config, batch_size=batch_size)
            network = Network(sized, vocab_size, functions)
            built[batch_size, True] = build_step(network, comm, f"batch_{batch_size}")
            if comm.size > 1:
                built[batch_size, False] = build_step(
                    network, _WithoutExchange(comm), f"alone_{batch_size}"
                )
        # Finalizes the graph and broadcasts the weights, as in training.
        session = tf.train.SingularMonitoredSession(
            hooks=comm.hooks(), config=session_config
        ).raw_session()
        for variable in tf.trainable_variables() if functions.is_built_in else []:
            name, shape = variable.op.name, variable.shape.as_list()
            variable.load(initial_weight(config, name, shape), session)

    def take(batch_size: int, exchange: bool, inputs: np.ndarray, targets: np.ndarray):
        step = built[batch_size, exchange]
        with one_line_errors(functions, running=True):
            result = run_step(session.run, step, inputs, targets, config.learning_rate)
        return result.nll.nats / batch_size, result.grad_norm

    return {key: functools.partial(take, *key) for key in built}


class _WithoutExchange(OneProcess):
    """A rank that trains its share of the rows, and exchanges nothing."""

    def __init__(self, comm: Communicator):
        self.rank, self.size = comm.rank, comm.size
