"""The instruction sets of this machine, and computations in new processes."""

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

# The flags in /proc/cpuinfo that each instruction set of lm/kernels requires.
NEEDED = {
    "generic": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512bf16": {"avx512_bf16"},
}


def has(isa: str) -> bool:
    """Return whether the processor supports an instruction set in NEEDED."""
    with open("/proc/cpuinfo") as file:
        flags = next(line for line in file if line.startswith(("flags", "Features")))
    return NEEDED[isa] <= set(flags.split())


def in_new_processes(work: Callable, calls: Sequence[tuple]) -> list[Any]:
    """Call a function of a test module several times, each in a new process; return the results.

    The first session of a process sets the thread count for all its sessions. The new processes
    are forks of a process with TensorFlow loaded, because loading TensorFlow takes seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    with context.Pool(1, maxtasksperchild=1) as pool:
        return pool.starmap(work, calls, chunksize=1)
