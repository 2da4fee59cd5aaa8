"""What the launcher started (mpirun, srun, horovodrun or none), and joining it."""

from __future__ import annotations

import os

from lm.distributed.communicator import Communicator, OneProcess
from lm.distributed.cores import unbind_from_core

# The launchers' variables for the number of processes and the rank of this one. The first that is
# there counts: an mpirun within an srun's step inherits the numbers of that one.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI's mpirun
    ("HOROVOD_SIZE", "HOROVOD_RANK"),  # horovodrun with Gloo
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # srun
)


def launched_size() -> int:
    """Return the number of processes that the launcher says it started, 1 without one."""
    return next((int(os.environ[size]) for size, _ in _LAUNCHERS if size in os.environ), 1)


def launched_rank() -> int:
    """Return this process's rank according to the launcher, 0 without one."""
    ranks = (os.environ.get(rank, "0") for size, rank in _LAUNCHERS if size in os.environ)
    return int(next(ranks, "0"))


def connect(timeline: bool = False) -> Communicator:
    """Join the other ranks of the launch, if there are any; to be called once in a process.

    Args:
      timeline: Whether `start_timeline` will be called.

    Raises:
      UserError: The launcher started several processes, but they cannot exchange.
    """
    size = launched_size()
    if size == 1:
        return OneProcess()
    unbind_from_core()  # Horovod's thread will have the cores of this one
    # Not above: one process trains without Horovod.
    from lm.distributed.horovod import HorovodCommunicator

    return HorovodCommunicator(size, timeline)
