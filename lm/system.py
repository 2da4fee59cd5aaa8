"""The process and its operating system: /proc, malloc, the import of TensorFlow, and seeds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator

_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # from malloc.h
_KERAS = "keras.src"  # hiding all of keras would fail: TensorFlow looks up where keras is
_libc = ctypes.CDLL(None)


def stat_fields(pid: int | str = "self") -> list[str]:
    """Return the fields of /proc/PID/stat, starting with the third, the state; see proc(5).

    Raises:
      OSError: If the process does not exist.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The second field, the name, is in parentheses and may contain any character.
        return file.read().rpartition(")")[2].split()


def seconds_since_start() -> float:
    """Return the age of this process, including the start of Python."""
    ticks = int(stat_fields()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_memory_mb() -> float:
    """Return the largest amount of memory that this process has used so far."""
    # getrusage would include the peak of the process that started this one.
    with open("/proc/self/status") as file:
        peak = next(line for line in file if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


def ends_with_this_process(signal_number: int) -> Callable[[], None]:
    """Return a `preexec_fn` for a child that should get a signal when this process dies.

    The signal is sent even if this process is killed.
    """
    parent = os.getpid()

    def follow() -> None:
        _libc.prctl(_SET_DEATH_SIGNAL, signal_number)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return follow


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next step, which needs the same amount.

    Memory that was returned to the system costs a page fault per 4 KiB when it is used again. In a
    virtual machine, page faults can take a quarter of a step (docs/performance.md). All threads use
    one arena, because the arenas of threads cannot hold blocks above 64 MiB. Call this function
    before any threads start.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        _libc.mallopt(_M_MMAP_MAX, 0)
        _libc.mallopt(_M_ARENA_MAX, 1)


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Discard everything that is written to file descriptor 2, even by C++ code."""
    try:
        stderr = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def import_tensorflow() -> None:
    """Import TensorFlow silently and in half the usual time.

    TensorFlow imports Keras, which this program never uses, and Keras imports matplotlib. If Keras
    is missing, TensorFlow works without it, and later imports of Keras still succeed. The objects
    that the import creates live forever, so the garbage collector should not scan them.
    """
    if "tensorflow" in sys.modules or _KERAS in sys.modules:
        return
    sys.modules[_KERAS] = None  # makes the import fail
    gc.disable()
    try:
        # TensorFlow 2.20 and 2.21 write two lines about oneDNN to file descriptor 2 before they
        # read the log level. Level 0 means that the user wants to see all messages.
        shown = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") == "0"
        with contextlib.nullcontext() if shown else without_stderr():
            import tensorflow  # noqa: F401
    finally:
        del sys.modules[_KERAS]
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of Python and NumPy, and restore their state at the end.

    Args:
      seed: A number from 0 to 2^64 - 1.
    """
    import numpy as np  # starts threads, so not before keep_freed_memory()

    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
