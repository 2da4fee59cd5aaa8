"""The supervisor ends a rank that hangs, and keeps ranks in touch while some of them work.

A rank that waits for a dead host waits inside MPI's C code, which has no timeout. A thread of this
process watches the time instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from lm.distributed.agreement import name_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.launch import mpirun_above
from lm.distributed.signals import Signals
from lm.errors import ERROR
from lm.system import stat_fields

_TICK_SECONDS = 0.5
_GRACE_SECONDS = 4.0
_POLL_SECONDS = 1.0
_MOST_HOSTS = 8


class Interrupted(Exception):
    """A stop signal was received. All ranks raise this error at the same point."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class _Process(NamedTuple):
    """The process of a rank."""

    host: str
    pid: int


class _Phase(NamedTuple):
    """The current activity of this rank; see `Supervisor.enter`."""

    name: str
    stoppable: bool = False
    alone: bool = False
    progress: int = 0  # number of phases since the start that made progress


class Supervisor:
    """Receives the signals of this rank, and ends it if it makes no progress, until closed.

    All ranks must create it together. `timeout_seconds` limits each phase; 0 means no limit.
    """

    def __init__(self, comm: Communicator, timeout_seconds: float):
        self.signals = Signals()
        self._comm, self._timeout = comm, timeout_seconds
        own = _Process(socket.gethostname(), os.getpid())
        self._processes = [_Process(*process) for process in comm.gather(own)]
        self._phase = _Phase("the start")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        if comm.size > 1:
            self._thread.start()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self.signals.close()

    def enter(
        self, phase: str, stoppable: bool = False, alone: bool = False, progress: bool = True
    ) -> None:
        """Begin a phase, which ends the previous phase.

        Args:
          phase: Name of the phase, for the user.
          stoppable: Whether this rank must react to a stop signal within a few times the usual
            duration of such phases. Not for the save that follows a stop signal: copying large
            weights takes longer than a step.
          alone: Whether this rank works without waiting for other ranks.
          progress: Whether the previous phase made progress. If not, its time counts as part of
            this phase.
        """
        self._phase = _Phase(phase, stoppable, alone, self._phase.progress + progress)

    def waiting(self, phase: str, stoppable: bool = True) -> Waiting:
        """Begin a phase in which some ranks work for a long time while other ranks wait."""
        return Waiting(self._comm, self, phase, stoppable)

    def _watch(self) -> None:
        now, idle, longest, current = time.monotonic(), 0.0, 0.0, self._phase
        while not self._closed.wait(_TICK_SECONDS):
            before, now = now, time.monotonic()
            last, current = current, self._phase
            if current.progress != last.progress:
                longest = max(longest, idle if last.stoppable else 0.0)
                idle = 0.0
            # Ignore the time when this process itself was stopped: a scheduler may suspend a job
            # for hours.
            idle += min(now - before, 2 * _TICK_SECONDS)
            if self.signals.stop and current.stoppable and idle > _GRACE_SECONDS + 3 * longest:
                # A rank is probably dead. Do not print a message: mpirun sends the signal after a
                # rank failed, and that rank printed the error. Do not exit with the code of the
                # signal, which would mean that the run is saved.
                os._exit(1)
            if self._timeout and idle > self._timeout:
                self._give_up(current, idle)

    def _give_up(self, phase: _Phase, idle: float) -> NoReturn:
        own = self._processes[self._comm.rank]
        where = phase.name
        if not phase.alone:
            where += f", waiting for {_waited_for(self._processes, self._comm.rank)}"
        _print_error(
            f"rank {self._comm.rank} on {own.host}: no progress for {idle:.0f} s in {where}"
            " (--step_timeout_seconds)"
        )
        if any(process.host != own.host for process in self._processes):
            # mpirun, or its daemon, would wait forever for a disconnected host.
            launcher = mpirun_above()
            with contextlib.suppress(OSError):
                if launcher:
                    os.kill(launcher, signal.SIGKILL)
        os._exit(1)


class Waiting:
    """A phase in which some ranks work while the ranks that are done wait in `gather`.

    About once per second, all ranks meet in an exchange. Working ranks wait there for the slowest
    rank's current piece of work. Waiting ranks notice that the working ranks are alive, and all
    ranks notice a stop signal. In a single long exchange, slow work would look like a dead host.
    """

    def __init__(self, comm: Communicator, supervisor: Supervisor, phase: str, stoppable: bool):
        self._comm, self._supervisor = comm, supervisor
        self._phase, self._stoppable = phase, stoppable
        self._next_exchange = time.monotonic() + _POLL_SECONDS
        self._enter()

    def poll(self, progress: bool = True) -> None:
        """Report, about once per second, that this rank is working, and whether work advanced.

        Raises:
          Interrupted: If any rank received a stop signal.
        """
        self._enter(progress)
        if time.monotonic() > self._next_exchange or self._stop_requested():
            self._exchange({"done": False}, progress)

    def gather(self, value: Any) -> list:
        """Wait until all ranks call this method, and return their values in rank order.

        Raises:
          Interrupted: If any rank received a stop signal.
        """
        while True:
            reports = self._exchange({"done": True, "value": value}, progress=True)
            if all(report["done"] for report in reports):
                return [report["value"] for report in reports]

    def _enter(self, progress: bool = True) -> None:
        self._supervisor.enter(self._phase, self._stoppable, progress=progress)

    def _stop_requested(self) -> int:
        return self._supervisor.signals.stop if self._stoppable else 0

    def _exchange(self, report: dict[str, Any], progress: bool) -> list[dict]:
        reports = self._comm.gather({**report, "stop": self._stop_requested()})
        self._enter(progress)
        self._next_exchange = time.monotonic() + _POLL_SECONDS
        stop = max(report["stop"] for report in reports)
        if stop and not all(report["done"] for report in reports):
            raise Interrupted(stop)
        return reports


def _waited_for(processes: Sequence[_Process], own_rank: int) -> str:
    """Name the ranks that probably block this rank, as far as this host can know."""
    own_host = processes[own_rank].host
    others = {rank: process for rank, process in enumerate(processes) if rank != own_rank}
    stopped = [r for r, p in others.items() if p.host == own_host and not _is_running(p.pid)]
    if stopped:
        verb = "are" if len(stopped) > 1 else "is"
        return f"{name_ranks(stopped)} on {own_host}, which {verb} stopped or gone"
    elsewhere: dict[str, list[int]] = {}
    for rank, process in others.items():
        if process.host != own_host:
            elsewhere.setdefault(process.host, []).append(rank)
    if len(elsewhere) > _MOST_HOSTS:
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


def _print_error(message: str) -> None:
    # Do not use print(), because the hanging thread may hold its lock. The terminal may be closed.
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{ERROR}{message}\n".encode())
    time.sleep(1)  # the launcher ends with this rank, and must first forward the lines of all ranks
