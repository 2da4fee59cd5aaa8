"""Starts processes that measure, and lets one of them run at a time."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Optional

from lm.distributed import mpirun
from lm.errors import RunError
from lm.processes import ends_with_this_process

_ANSWER_SECONDS = 1800  # a request that takes longer hangs
_STOP_SECONDS = 10

# mpirun hands the signals that make it pause and go on to its ranks only if told to.
_PASS_ON_PAUSES = ("-mca", "orte_forward_job_control", "1")


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that may use so many threads."""
    return mpirun.environment(
        OMP_NUM_THREADS=str(threads),
        MKL_NUM_THREADS=str(threads),
        # Ranks exchange something, in a session, before they are told how many threads to use.
        TF_NUM_INTRAOP_THREADS=str(threads),
        TF_NUM_INTEROP_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="3",
        PYTHONUNBUFFERED="1",
    )


def run_to_end(command: Sequence[str], threads: int) -> str:
    """Run a command that measures and ends, while no worker runs; return what it printed.

    Raises:
      RunError: It fails.
    """
    Worker.pause_all()
    try:
        done = subprocess.run(
            command,
            env=_environment(threads),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{' '.join(command)} hangs") from None
    if done.returncode:
        raise RunError(f"{' '.join(command)} failed: {_last_line(done.stderr)}")
    return done.stdout


class Worker(contextlib.AbstractContextManager):
    """A process, or several under mpirun, that stands still while another one runs.

    Standing still is literal (SIGSTOP): thread pools and MPI poll while they wait, and would
    take the cores from the one that is being measured.

    Args:
      server: Name of a class in `servers.py`.
      arguments: Its arguments, as JSON values.
      ranks: Number of ranks.
      threads: Threads of each.
      hosts: As mpirun's -H, or None for this host.
    """

    _running: Optional[Worker] = None  # the only one that is not stopped

    def __init__(
        self,
        server: str,
        arguments: dict[str, Any],
        *,
        ranks: int = 1,
        threads: int = 1,
        hosts: Optional[str] = None,
    ):
        launcher = [*mpirun.command(ranks, hosts), *_PASS_ON_PAUSES] if ranks > 1 else []
        # mpirun ends its ranks on SIGTERM; a single worker, which may be stopped, needs SIGKILL.
        self._pause = signal.SIGTSTP if launcher else signal.SIGSTOP
        last = signal.SIGTERM if launcher else signal.SIGKILL
        self._name = f"{arguments.get('contestant', 'exchange')} on {ranks} rank(s)"
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "lm.benchmark.workers"],
            env=_environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            # Ctrl-C is for the parent, which then ends the workers in order.
            start_new_session=True,
            # A stopped worker would never notice by itself that this process is gone, and stay.
            preexec_fn=ends_with_this_process(last),
        )
        self.ask(server, **arguments)  # the first request makes it

    def ask(self, do: str, **arguments: Any) -> list:
        """Let the worker run until it has answered.

        Args:
          do: Method of the server.
          **arguments: Its arguments.

        Returns:
          The results of all ranks, by rank.

        Raises:
          RunError: The worker ended or hangs.
        """
        self._take_turn()
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_SECONDS)
            line = self._process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line is None:
            raise RunError(f"{self._name}: no answer to {do} for {_ANSWER_SECONDS} s")
        if not line:
            self._stderr.seek(0)
            raise RunError(f"{self._name} failed: {_last_line(self._stderr.read())}")
        return json.loads(line)

    def _take_turn(self) -> None:
        if Worker._running is not self:
            Worker.pause_all()
            self._process.send_signal(signal.SIGCONT)
            Worker._running = self

    @staticmethod
    def pause_all() -> None:
        """Stop the worker that runs; it goes on when it is asked something."""
        # Not right after each answer: mpirun may forward a stop and a continue that arrive
        # together in the wrong order, and the worker would stand still for ever.
        worker, Worker._running = Worker._running, None
        if worker:
            worker._process.send_signal(worker._pause)

    def close(self) -> None:
        """End the worker and all its ranks."""
        process = self._process
        self._take_turn()
        Worker._running = None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for end in (lambda: None, process.terminate, process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
                break
        process.stdout.close()
        self._stderr.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _last_line(text: str) -> str:
    """The error among the lines of a failed process: mpirun adds a banner after it."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["it said nothing"])[-1]
