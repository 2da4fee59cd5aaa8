"""How TensorFlow uses this process's device and threads."""

from __future__ import annotations

import os
from typing import NamedTuple, Optional

import tensorflow.compat.v1 as tf

from lm.distributed.cores import count_cores
from lm.errors import UserError


class Threads(NamedTuple):
    """Threads inside one operation, and operations at a time."""

    intra_op: int
    inter_op: int


def choose_threads(intra_op: Optional[int], inter_op: Optional[int], local_size: int) -> Threads:
    """Share the host's cores out over its ranks.

    Args:
      intra_op: The user's choice, or None.
      inter_op: The user's choice, or None.
      local_size: Ranks on this host.
    """
    return Threads(intra_op or max(count_cores() // local_size, 1), inter_op or 1)


def session_config(threads: Threads, local_rank: int, local_size: int) -> tf.ConfigProto:
    """Pin this process to its own GPU, if there are any, and set its threads.

    Args:
      threads: From `choose_threads`.
      local_rank: Rank within this host.
      local_size: Ranks on this host.

    Raises:
      UserError: The host has GPUs, but fewer than ranks.
    """
    config = tf.ConfigProto(
        intra_op_parallelism_threads=threads.intra_op,
        inter_op_parallelism_threads=threads.inter_op,
    )
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if num_gpus:
        if local_size > num_gpus:
            raise UserError(
                f"{local_size} ranks on this host but {num_gpus} visible GPUs: start one rank per"
                " GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        # One process per GPU: two in one GPU's memory would fail or thrash.
        config.gpu_options.visible_device_list = str(local_rank)
        config.gpu_options.allow_growth = True
    return config


def start_tensorflow(threads: Threads) -> None:
    """Run this process's first session, with stderr closed; nothing of TensorFlow may run before.

    Its thread pools serve all later sessions, whatever their configs say: without this, something
    as small as making a Saver gives each rank as many threads as the host has cores. And it
    prints three lines about MLIR, on every rank, which no log level suppresses.
    """
    config = tf.ConfigProto(
        intra_op_parallelism_threads=threads.intra_op,
        inter_op_parallelism_threads=threads.inter_op,
        device_count={"GPU": 0},
    )
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere, tf.Graph().as_default() as graph:
            os.dup2(nowhere.fileno(), 2)
            tf.Session(graph=graph, config=config).run(tf.no_op())
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def device_name(local_rank: int) -> str:
    """Return the device that this process computes on, as TensorFlow names it."""
    return f"GPU:{local_rank}" if tf.config.list_physical_devices("GPU") else "CPU:0"
