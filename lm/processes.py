"""Processes as Linux has them: their state, their common end, and what they say behind Python."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Callable, Union

_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of malloc.h
_KEEP = {_M_TRIM_THRESHOLD: 2**31 - 1, _M_MMAP_MAX: 0, _M_ARENA_MAX: 1}
_libc = ctypes.CDLL(None)


def stat_fields(pid: Union[int, str] = "self") -> list[str]:
    """Return the fields of /proc/PID/stat from the third, the state, on; see proc(5).

    Raises:
      OSError: There is no such process.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The second, the name, stands in parentheses and may hold anything.
        return file.read().rpartition(")")[2].split()


def ends_with_this_process(signal_number: int) -> Callable[[], None]:
    """Return what a child does first (`preexec_fn`) to get a signal when this process dies.

    However it dies: killed, it can stop nothing any more.
    """
    parent = os.getpid()

    def follow() -> None:
        _libc.prctl(_SET_DEATH_SIGNAL, signal_number)
        if os.getppid() != parent:  # it has died before
            os._exit(1)

    return follow


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what is freed, for the next step, which needs as much.

    Memory that was given back to the system comes again with a page fault for each 4 KiB, and in a
    virtual machine these may cost a quarter of a step (docs/performance.md). All is in one arena:
    the others, of threads, hold no piece above 64 MiB. To be called before there are threads.
    """
    if hasattr(_libc, "mallopt"):
        for parameter, value in _KEEP.items():
            _libc.mallopt(parameter, value)


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Let nothing through that is written past sys.stderr, to file descriptor 2."""
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
