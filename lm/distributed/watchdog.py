"""The end of a job that would otherwise hang: a rank that waits in MPI for one that is gone.

MPI waits inside C, for ever, and nothing there looks at a clock; a thread of our own does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Optional

from lm.distributed.naming import name_ranks
from lm.errors import ERROR
from lm.processes import stat_fields

_TICK_SECONDS = 0.5
_GRACE_SECONDS = 4.0
_NAMED_HOSTS = 8
_OPEN_MPI = ("mpirun", "mpiexec", "orterun", "orted")  # never the parent that is a scheduler's


class Process(NamedTuple):
    """Where a rank runs."""

    host: str
    pid: int


def own_process() -> Process:
    """Return the host and process id of this rank."""
    return Process(socket.gethostname(), os.getpid())


def mpirun_above() -> Optional[int]:
    """Return the process id of the mpirun, or of its daemon, that has started this process."""
    # Not by the environment, which what a rank starts inherits.
    parent = os.getppid()
    with contextlib.suppress(OSError):
        with open(f"/proc/{parent}/cmdline", encoding="utf-8", errors="replace") as file:
            if os.path.basename(file.read().split("\0")[0]) in _OPEN_MPI:
                return parent
    return None


def end_with_launcher() -> None:
    """End this process when its launcher is gone: killed, it can no longer end its ranks."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_TICK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


class _Phase(NamedTuple):
    """What a rank is at."""

    name: str
    stoppable: bool = False
    alone: bool = False
    signs_of_life: int = 0  # since the start


class Watchdog:
    """Ends this rank when it has made no progress for too long, until it is closed.

    Args:
      timeout_seconds: How long a phase may take; 0 for ever.
      ranks: The processes of all ranks, by rank.
      rank: This rank.
      stop_requested: Returns the number of the signal that asked this rank to stop, or 0. Then
        the ranks should stop at the end of a stoppable phase; if another rank is dead that never
        comes, and this one must not wait for the timeout.
    """

    def __init__(
        self,
        timeout_seconds: float,
        ranks: Sequence[Process],
        rank: int,
        stop_requested: Callable[[], int],
    ):
        self._timeout, self._ranks, self._rank = timeout_seconds, ranks, rank
        self._stop_requested = stop_requested
        self._phase = _Phase("the start")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if len(ranks) > 1:
            self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def beat(
        self, phase: str, stoppable: bool = False, alone: bool = False, progress: bool = True
    ) -> None:
        """Note progress: the last phase has ended and this one begins.

        Args:
          phase: Its name, for the user.
          stoppable: Whether a stop signal is to be heard within a few times what such a phase
            takes. Not a save, which the signal itself has asked for: a copy of large weights
            takes longer than any step.
          alone: Whether it is work of this rank, in which it waits for no other.
          progress: False where nothing has got on: the time of the last phase counts on.
        """
        signs_of_life = self._phase.signs_of_life + progress
        self._phase = _Phase(phase, stoppable, alone, signs_of_life)

    def _watch(self) -> None:
        now, idle, longest, seen = time.monotonic(), 0.0, 0.0, self._phase
        while not self._closed.wait(_TICK_SECONDS):
            before, now = now, time.monotonic()
            last, seen = seen, self._phase
            if seen.signs_of_life != last.signs_of_life:
                longest = max(longest, idle if last.stoppable else 0.0)
                idle = 0.0
            # Time that this process itself was stopped for does not count: a scheduler may
            # suspend a whole job for hours and then let it go on.
            idle += min(now - before, 2 * _TICK_SECONDS)
            stop = self._stop_requested()
            if stop and seen.stoppable and idle > _GRACE_SECONDS + 3 * longest:
                # Without a word, which would follow that of a rank that has failed: mpirun signals
                # the others. And not with the signal's code, which means that all is saved.
                os._exit(1)
            if self._timeout and idle > self._timeout:
                self._give_up(seen, idle)

    def _give_up(self, phase: _Phase, idle: float) -> NoReturn:
        own = self._ranks[self._rank]
        where = phase.name
        if not phase.alone:
            where += f", waiting for {_waited_for(self._ranks, self._rank)}"
        _say(
            f"rank {self._rank} on {own.host}: no progress for {idle:.0f} s in {where}"
            " (--step_timeout_seconds)"
        )
        if any(process.host != own.host for process in self._ranks):
            _kill_launcher()
        os._exit(1)


def _kill_launcher() -> None:
    """Kill mpirun or its daemon, which waits for ever for a host that is cut off."""
    launcher = mpirun_above()
    if launcher:
        with contextlib.suppress(OSError):
            os.kill(launcher, signal.SIGKILL)


def _waited_for(ranks: Sequence[Process], own_rank: int) -> str:
    """Name the ranks that hold up the others, as well as one host can know them."""
    own_host = ranks[own_rank].host
    others = {rank: process for rank, process in enumerate(ranks) if rank != own_rank}
    stopped = [r for r, p in others.items() if p.host == own_host and not _is_running(p.pid)]
    if stopped:
        verb = "are" if len(stopped) > 1 else "is"
        return f"{name_ranks(stopped)} on {own_host}, which {verb} stopped or gone"
    elsewhere: dict[str, list[int]] = {}
    for rank, process in others.items():
        if process.host != own_host:
            elsewhere.setdefault(process.host, []).append(rank)
    if len(elsewhere) > _NAMED_HOSTS:
        return f"the ranks on {len(elsewhere)} other hosts"
    if elsewhere:
        return " or ".join(f"{name_ranks(found)} on {host}" for host, found in elsewhere.items())
    verb = "run but do" if len(others) > 1 else "runs but does"
    return f"{name_ranks(list(others))}, which {verb} not answer"


def _is_running(pid: int) -> bool:
    try:
        return stat_fields(pid)[0] not in "TtZX"
    except OSError:
        return False


def _say(message: str) -> None:
    # No print: its lock may be held by the thread that hangs. And the terminal may be gone.
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{ERROR}{message}\n".encode())
    time.sleep(1)  # the launcher, which ends with this rank, passes on all ranks' lines first
