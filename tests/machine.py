"""What this machine's processor has, and processes of their own to compute in."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

# What the instruction sets of lm/kernels need, as /proc/cpuinfo calls it.
NEEDED = {
    "generic": set(),
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512bf16": {"avx512_bf16"},
}


def has(isa: str) -> bool:
    """Return whether the processor has an instruction set of NEEDED."""
    with open("/proc/cpuinfo") as file:
        flags = next(line for line in file if line.startswith(("flags", "Features")))
    return NEEDED[isa] <= set(flags.split())


def in_new_processes(work: Callable, calls: Sequence[tuple]) -> list[Any]:
    """Return what a function of a test module says to each call, each in a process of its own.

    The first session of a process sizes the threads of all others. Forked from one that has
    TensorFlow loaded, because that takes seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    with context.Pool(1, maxtasksperchild=1) as pool:
        return pool.starmap(work, calls, chunksize=1)
