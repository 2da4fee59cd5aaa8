"""What a check-up finds out by exchanging and computing: sums, bandwidth, scaling."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lm.check.checklist import FAIL, OK, WARN, Checklist
from lm.distributed.communicator import Communicator

_EXCHANGED_BYTES = 16 << 20  # near the gradients of config_small
_MIN_BYTES_PER_SECOND = 100e6  # about an Ethernet of 1 Gbit/s
_NUMBERS = 8_000_000  # some tenths of a second
_MIN_EFFICIENCY = 0.6


def check_exchange(
    checklist: Checklist, comm: Communicator, allreduce: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Check that the ranks add correctly, and how fast.

    Args:
      checklist: Where the lines go.
      comm: The ranks.
      allreduce: Returns the sum over the ranks of a float32 vector.
    """
    result = allreduce(np.ones(1000, np.float32))
    checklist.add(
        OK if (result == comm.size).all() else FAIL,
        "allreduce",
        f"the sum of ones over the ranks is {result[0]:g}; it must be {comm.size}",
        "Horovod was not built for this MPI: run run_scripts/setup.sh on every host",
    )
    latency = _best_seconds(comm, lambda: allreduce(np.ones(1, np.float32)))
    gathered = _best_seconds(comm, comm.barrier)
    values = np.ones(_EXCHANGED_BYTES // 4, np.float32)
    seconds = _best_seconds(comm, lambda: allreduce(values))
    speed = _EXCHANGED_BYTES / seconds
    checklist.add(
        OK if speed >= _MIN_BYTES_PER_SECOND else WARN,
        "bandwidth",
        f"the ranks sum {_EXCHANGED_BYTES >> 20} MiB in {1000 * seconds:.1f} ms"
        f" ({speed / 1e6:.0f} MB/s), one number in {1000 * latency:.2f} ms; each hears of all in"
        f" {1000 * gathered:.2f} ms",
        "the network is slow, or it is the wrong one: choose its interface with"
        " -mca btl_tcp_if_include",
    )


def check_scaling(checklist: Checklist, comm: Communicator) -> None:
    """Time the same work on rank 0 alone, then on all ranks at once."""
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


def _best_seconds(comm: Communicator, work: Callable[[], Any]) -> float:
    """Time work that starts on all ranks at once, to the end of the slowest; the best turn."""
    times = []
    for _ in range(3):
        comm.barrier()
        start = time.perf_counter()
        work()
        times.append(max(comm.gather(time.perf_counter() - start)))
    return min(times)
