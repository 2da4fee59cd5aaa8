"""The supervisor ends a rank that hangs, and keeps ranks in touch while some of them work.

A rank that waits for a dead host waits inside MPI's C code, which has no timeout. A thread of this
process watches the time instead.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from lm.distributed.agreement import name_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.launch import mpirun_above, repeat_after_mpirun
from lm.distributed.signals import Signals
from lm.errors import ERROR
from lm.system import stat_fields

TICK_SECONDS = 0.5
POLL_SECONDS = 1.0
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
    namespace: str  # the boot and the PID namespace, because several hosts may have the same name

    def shares_pids(self, other: _Process) -> bool:
        return (self.host, self.namespace) == (other.host, other.namespace)


def _this_process() -> _Process:
    namespace = ""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return _Process(socket.gethostname(), os.getpid(), namespace)


class _Phase(NamedTuple):
    """The current activity of this rank."""

    name: str
    begun: float
    alone: bool = False  # whether this rank works without waiting for other ranks
    patient: bool = False  # whether the time is limited only if another process is stopped


class Supervisor:
    """Receives the signals of this rank, and ends it if it makes no progress, until closed.

    All ranks must create it together. A `with` statement names each phase of the work. Phases may
    be nested. Their time limit starts again whenever this rank makes progress: when a phase begins
    or ends, and when `progressed` is called.

    Attributes:
      timeout: Time limit in seconds; 0 means no limit.
      on_failure: Called in a separate thread, with the reason, when this rank is ended.
    """

    def __init__(self, comm: Communicator, timeout_seconds: float, signals: Signals | None = None):
        # A single process may be the user's notebook.
        self.signals = signals or Signals(comm.is_rank_0, exits=comm.size > 1)
        self.timeout = timeout_seconds
        self._comm, self._num_progressed = comm, 0
        self._own, self._processes = _this_process(), []
        self.on_failure: Callable[[str], None] = lambda reason: None
        self._phase = _Phase("the preparation", time.monotonic(), patient=True)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        if comm.size > 1:
            self._thread.start()
        self._processes = [_Process(*process) for process in comm.gather(self._own)]

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self.signals.close()

    @property
    def activity(self) -> str:
        """The name and the duration of the current phase, for the user."""
        phase = self._phase
        return f"{phase.name}, for {time.monotonic() - phase.begun:.0f} s"

    def progressed(self) -> None:
        """Start the time limit again."""
        self._num_progressed += 1

    def exchange(self, name: str) -> contextlib.AbstractContextManager:
        """Begin a phase in which this rank waits for other ranks."""
        return self._begin(name)

    def preparing(self, name: str) -> contextlib.AbstractContextManager:
        """Begin a phase that may take any time while all processes run, such as a download."""
        return self._begin(name, patient=True)

    @contextlib.contextmanager
    def waiting(self, name: str, stoppable: bool = True) -> Iterator[Waiting]:
        """Begin a phase in which some ranks work for a long time while other ranks wait.

        `stoppable` is whether a stop signal interrupts the phase.
        """
        with self._begin(name, alone=True):
            yield Waiting(self._comm, self, name, stoppable)

    @contextlib.contextmanager
    def _begin(self, name: str, **kind: bool) -> Iterator[None]:
        self.progressed()
        with self.renamed(name, **kind):
            yield
        self.progressed()

    @contextlib.contextmanager
    def renamed(self, name: str, **kind: bool) -> Iterator[None]:
        """Begin a phase within the time limit of the enclosing phase."""
        outer, self._phase = self._phase, _Phase(name, time.monotonic(), **kind)
        try:
            yield
        finally:
            self._phase = outer

    def _watch(self) -> None:
        now, idle, progressed = time.monotonic(), 0.0, self._num_progressed
        while not self._closed.wait(TICK_SECONDS):
            before, now = now, time.monotonic()
            if self._num_progressed != progressed:
                idle, progressed = 0.0, self._num_progressed
            # Ignore the time when this process itself was stopped: a scheduler may suspend a job
            # for hours.
            idle += min(now - before, 2 * TICK_SECONDS)
            if self.timeout and idle > self.timeout:
                phase = self._phase
                if phase.patient and self._processes and not _stopped(self._processes, self._own):
                    idle = 0.0
                else:
                    self._give_up(phase, idle)

    def _give_up(self, phase: _Phase, idle: float) -> NoReturn:
        own, where = self._own, phase.name
        if not phase.alone:
            where += f", waiting for {_waited_for(self._processes, self._comm.rank)}"
        reason = (
            f"rank {self._comm.rank} on {own.host}: no progress for {idle:.0f} s in {where}"
            " (--step_timeout_seconds)"
        )
        # The disk may hang, so do not wait for this thread.
        threading.Thread(target=self.on_failure, args=[reason], daemon=True).start()
        _print_error(reason)
        if not all(map(own.shares_pids, self._processes)):
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

    def __init__(self, comm: Communicator, supervisor: Supervisor, name: str, stoppable: bool):
        self._comm, self._supervisor = comm, supervisor
        self._name, self._stoppable = name, stoppable
        self._next_exchange = time.monotonic() + POLL_SECONDS

    def poll(self, progress: bool = True) -> None:
        """Report, about once per second, that this rank is working, and whether work advanced.

        Raises:
          Interrupted: If any rank received a stop signal.
        """
        if progress:
            self._supervisor.progressed()
        if time.monotonic() > self._next_exchange or self._stop_requested():
            self._exchange({"done": False})

    def gather(self, value: Any) -> list:
        """Wait until all ranks call this method, and return their values in rank order.

        Raises:
          Interrupted: If any rank received a stop signal.
        """
        while True:
            reports = self._exchange({"done": True, "value": value})
            self._supervisor.progressed()
            if all(report["done"] for report in reports):
                return [report["value"] for report in reports]

    def _stop_requested(self) -> int:
        return self._supervisor.signals.stop if self._stoppable else 0

    def _exchange(self, report: dict[str, Any]) -> list[dict]:
        with self._supervisor.renamed(self._name):
            reports = self._comm.gather({**report, "stop": self._stop_requested()})
        self._next_exchange = time.monotonic() + POLL_SECONDS
        stop = max(report["stop"] for report in reports)
        if stop and not all(report["done"] for report in reports):
            raise Interrupted(stop)
        return reports


def _stopped(processes: Sequence[_Process], own: _Process) -> list[int]:
    """Return the ranks on this host whose processes are stopped or gone."""
    here = [(rank, process) for rank, process in enumerate(processes) if own.shares_pids(process)]
    return [rank for rank, process in here if process != own and not _is_running(process.pid)]


def _waited_for(processes: Sequence[_Process], own_rank: int) -> str:
    """Name the ranks that probably block this rank, as far as this host can know."""
    if not processes:
        return "the other ranks"
    own = processes[own_rank]
    if stopped := _stopped(processes, own):
        verb = "are" if len(stopped) > 1 else "is"
        return f"{name_ranks(stopped)} on {own.host}, which {verb} stopped or gone"
    others = [rank for rank in range(len(processes)) if rank != own_rank]
    elsewhere: dict[str, list[int]] = {}
    for rank in others:
        if not own.shares_pids(processes[rank]):
            elsewhere.setdefault(processes[rank].host, []).append(rank)
    if len(elsewhere) > _MOST_HOSTS:
        return f"the ranks on {len(elsewhere)} other hosts"
    if elsewhere:
        return " or ".join(f"{name_ranks(found)} on {host}" for host, found in elsewhere.items())
    verb = "run but do" if len(others) > 1 else "runs but does"
    return f"{name_ranks(others)}, which {verb} not answer"


def _is_running(pid: int) -> bool:
    try:
        return stat_fields(pid)[0] not in "TtZX"
    except OSError:
        return False


def _print_error(message: str) -> None:
    # Do not use print(), because the hanging thread may hold its lock. The terminal may be closed.
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{ERROR}{message}\n".encode())
    repeat_after_mpirun(f"{ERROR}{message}")
    time.sleep(1)  # the launcher ends with this rank, and must first forward the lines of all ranks
