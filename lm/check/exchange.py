"""Checks that exchange or compute: sums, bandwidth and scaling."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow.compat.v1 as tf

from lm.check.checklist import FAIL, OK, WARN, Checklist
from lm.distributed.communicator import Communicator

_EXCHANGED_BYTES = 16 << 20  # about the size of config_small's gradients
_MIN_BYTES_PER_SECOND = 100e6  # about 1 Gbit/s Ethernet
_NUMBERS = 8_000_000  # a few tenths of a second
_MIN_EFFICIENCY = 0.6


def check_exchange(checklist: Checklist, comm: Communicator, config: tf.ConfigProto) -> None:
    """Check that the ranks compute correct sums, and measure the speed."""
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        values_ph = tf.placeholder(tf.float32, [None])
        sum_op = comm.sum(values_ph, "check")

        def allreduce(values: np.ndarray) -> np.ndarray:
            return session.run(sum_op, {values_ph: values})

        result = allreduce(np.ones(1000, np.float32))
        latency = _best_seconds(comm, lambda: allreduce(np.ones(1, np.float32)))
        values = np.ones(_EXCHANGED_BYTES // 4, np.float32)
        seconds = _best_seconds(comm, lambda: allreduce(values))
    gathered = _best_seconds(comm, comm.barrier)
    checklist.add(
        OK if (result == comm.size).all() else FAIL,
        "allreduce",
        f"the sum of ones over the ranks is {result[0]:g}, and must be {comm.size}",
        "Horovod was built for a different MPI: run run_scripts/setup.sh on every host",
    )
    speed = _EXCHANGED_BYTES / seconds
    checklist.add(
        OK if speed >= _MIN_BYTES_PER_SECOND else WARN,
        "bandwidth",
        f"the ranks sum {_EXCHANGED_BYTES >> 20} MiB in {1000 * seconds:.1f} ms"
        f" ({speed / 1e6:.0f} MB/s), and one number in {1000 * latency:.2f} ms; gathering from all"
        f" takes {1000 * gathered:.2f} ms",
        "the network is slow, or MPI uses the wrong interface: select one with"
        " -mca btl_tcp_if_include",
    )


def check_scaling(checklist: Checklist, comm: Communicator) -> None:
    """Time the same computation on rank 0 only, and on all ranks at the same time."""
    alone = _best_seconds(comm, lambda: comm.is_rank_0 and _compute())
    efficiency = alone / _best_seconds(comm, _compute)
    checklist.add(
        OK if efficiency >= _MIN_EFFICIENCY else WARN,
        "scaling",
        f"{comm.size} ranks compute {comm.size * efficiency:.1f} times as fast as one (efficiency"
        f" {efficiency:.0%})",
        "the ranks compete for cores: start mpirun with --bind-to none or with fewer ranks, or"
        " stop other jobs on the hosts",
    )


def _compute() -> None:
    np.sqrt(np.random.default_rng(0).random(_NUMBERS, np.float32)).sum()


def _best_seconds(comm: Communicator, work: Callable) -> float:
    """Return the seconds until the slowest rank finishes, the best of three attempts."""
    times = []
    for _ in range(3):
        comm.barrier()
        start = time.perf_counter()
        work()
        times.append(max(comm.gather(time.perf_counter() - start)))
    return min(times)
