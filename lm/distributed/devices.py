"""How TensorFlow uses this process's device and threads."""

from __future__ import annotations

from typing import NamedTuple, Optional

import tensorflow.compat.v1 as tf

from lm.distributed.communicator import Communicator
from lm.distributed.cores import cores_of_rank, unbind_from_core
from lm.errors import UserError
from lm.processes import without_stderr


class Threads(NamedTuple):
    """Threads inside one operation, and operations at a time."""

    intra_op: int
    inter_op: int


def start_tensorflow(
    local_size: int, intra_op: Optional[int] = None, inter_op: Optional[int] = None
) -> Threads:
    """Take this process's share of the host's cores; nothing of TensorFlow may run before.

    The thread pools of a process's first session serve all later ones, whatever their configs
    say: without this one, something as small as making a Saver gives each rank as many threads as
    the host has cores. And it prints three lines about MLIR, on every rank, which no log level
    suppresses: they go nowhere.

    Args:
      local_size: Ranks on this host, which share its cores out.
      intra_op: The user's choice, or None.
      inter_op: The user's choice, or None.

    Returns:
      The threads that it has.
    """
    unbind_from_core()
    threads = Threads(intra_op or cores_of_rank(local_size), inter_op or 1)
    config = tf.ConfigProto(
        intra_op_parallelism_threads=threads.intra_op,
        inter_op_parallelism_threads=threads.inter_op,
        device_count={"GPU": 0},
    )
    with without_stderr(), tf.Graph().as_default() as graph:
        tf.Session(graph=graph, config=config).run(tf.no_op())
    return threads


def session_config(threads: Threads, comm: Communicator) -> tf.ConfigProto:
    """Return a config with this process's own GPU, if there are any, and its threads.

    Args:
      threads: From `start_tensorflow`.
      comm: The ranks.

    Raises:
      UserError: The host has GPUs, but fewer than ranks.
    """
    config = tf.ConfigProto(
        intra_op_parallelism_threads=threads.intra_op,
        inter_op_parallelism_threads=threads.inter_op,
    )
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if num_gpus:
        if comm.local_size > num_gpus:
            raise UserError(
                f"{comm.local_size} ranks on this host but {num_gpus} visible GPUs: start one rank"
                " per GPU, each of which sees all (under Slurm without --gpus-per-task), or hide"
                " the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        # One process per GPU: two in one GPU's memory would fail or thrash.
        config.gpu_options.visible_device_list = str(comm.local_rank)
        config.gpu_options.allow_growth = True
    return config


def device_name(local_rank: int) -> str:
    """Return the device that this process computes on, as TensorFlow names it."""
    return f"GPU:{local_rank}" if tf.config.list_physical_devices("GPU") else "CPU:0"
