"""A run's model in a TensorFlow session: the graph, this process's device, the run's weights."""

from __future__ import annotations

from typing import Callable, TypeVar

import tensorflow.compat.v1 as tf

from lm.checkpoint.store import load_weights
from lm.checkpoint.variables import set_weights
from lm.distributed.communicator import OneProcess
from lm.distributed.devices import Device, session_config, start_tensorflow
from lm.inference.run import Run
from lm.model.network import Network
from lm.model.user_errors import one_line_errors

ALONE = OneProcess()
Built = TypeVar("Built")


def open_session(
    run: Run, build: Callable[[Network], Built], device: Device | None = None
) -> tuple[tf.Session, Built]:
    """Build a graph around a run's model, and start a session of it with the run's weights.

    Args:
      run: Whose model it is.
      build: Adds to the graph what is to be run, given the model.
      device: This rank's device, or None if the program is one process.

    Returns:
      The session, and what `build` returned.

    Raises:
      UserError: The checkpoint does not fit the run's config, or the host has too few GPUs.
      RunError: The weights cannot be read.
    """
    device = device or start_tensorflow(ALONE)
    with tf.Graph().as_default():
        # A scope of ours: no operation takes the name of a variable, which would get another one.
        with one_line_errors(run.functions), tf.name_scope("lm_use"):
            built = build(Network(run.config, len(run.vocabulary), run.functions))
        session = tf.Session(config=session_config(device))
        session.run(tf.local_variables_initializer())
        set_weights(session, load_weights(run.checkpoint))
    return session, built
