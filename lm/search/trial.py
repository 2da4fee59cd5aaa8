"""The job of a trial: `lm.train`, on one rank or under mpirun, in the trial's run directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lm import run_files
from lm.config import Config
from lm.distributed.launch import mpirun_command, ranks_on
from lm.errors import ERROR, UserError
from lm.files import locked
from lm.search.places import TrialSlots, environment
from lm.search.prepare import Search
from lm.system import ends_with_this_process


class Outcome(NamedTuple):
    """The end of a job."""

    kind: str  # "finished", "stopped", "failed", or "lost" if its host no longer responds
    reason: str = ""  # of a failure, in one line
    is_user_error: bool = False  # whether a retry would fail with the same error


class TrialJob:
    """The job of a trial. It can be started again after it has ended.

    Args:
      search: The search.
      directory: The run directory of the trial.
      config: The config to train.
    """

    def __init__(self, search: Search, directory: str, config: Config):
        self.directory, self.config = directory, config
        self.num_reported = 0  # epochs that the driver has reported to the study
        self._program = [
            sys.executable, "-m", "lm.train", "--config", search.file.path,
            *_changed_fields(search.file.config, config),
            *(flag(name, value) for name, value in search.settings.run.items()),
            "--test_on", "none", "--output_dir", directory, "--resume",
        ]  # fmt: skip
        self._console = os.path.join(directory, run_files.CONSOLE)
        self._metrics = os.path.join(directory, run_files.METRICS)
        self._process: subprocess.Popen | None = None
        self._asked_to_stop = False
        self._console_start = 0
        self._events_at_start: list[dict[str, Any]] = []

    def start(self, slots: TrialSlots) -> bool:
        """Start the job, unless the previous job of the trial is still saving.

        Returns:
          Whether the job was started.
        """
        os.makedirs(self.directory, exist_ok=True)
        try:
            with locked(os.path.join(self.directory, run_files.LOCK)):
                pass
        except BlockingIOError:
            return False
        self._asked_to_stop, self._events_at_start = False, self._events()
        with open(self._console, "ab") as console:
            # A user can continue the run with this command.
            command = shlex.join(["python", *self._program[1:]])
            console.write(f"{command}\n".encode("utf-8", "surrogateescape"))
            console.flush()
            self._console_start = console.tell()
            self._process = launch(*_command(slots, self._program), console)
        return True

    def is_running(self) -> bool:
        """Return whether the job is running."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ask the job to save and exit."""
        if self.is_running() and not self._asked_to_stop:
            self._asked_to_stop = True
            # mpirun forwards SIGUSR2 immediately; see lm/distributed/signals.py.
            self._process.send_signal(signal.SIGUSR2)

    def wait(self) -> None:
        """Wait until the job has ended."""
        if self._process:
            self._process.wait()

    def perplexities(self) -> dict[int, float]:
        """Return the validation perplexity of each epoch."""
        return {
            event["epoch"]: event["valid_perplexity"]
            for event in self._events()
            if event.get("event") == "epoch" and "valid_perplexity" in event
        }

    def outcome(self) -> Outcome:
        """Return the outcome of the job, which has ended.

        A run reports its outcome in the last event of metrics.jsonl. A job that fails before its
        run starts writes no event, but it may print an error.
        """
        exit_code, end = self._process.poll(), self._end_event()
        is_user_error = exit_code == UserError.exit_code
        if end.get("outcome") == "finished" and self.perplexities():
            return Outcome("finished")
        if end.get("outcome") == "failed":
            return Outcome("failed", end["reason"], is_user_error)
        error = self._printed_error()
        if self._asked_to_stop and not error:
            return Outcome("stopped")
        reason = error or f"exit code {exit_code}; see the trial's {run_files.CONSOLE}"
        return Outcome("failed", reason, is_user_error)

    def _end_event(self) -> dict[str, Any]:
        events = self._events()
        # Without a change, the last event is from an earlier job.
        return events[-1] if events and events != self._events_at_start else {}

    def _printed_error(self) -> str | None:
        with open(self._console, "rb") as file:
            file.seek(self._console_start)
            return last_error(file.read())

    def _events(self) -> list[dict[str, Any]]:
        """Read the events of the run. A half-written last line is left out."""
        with contextlib.suppress(OSError, ValueError):
            with open(self._metrics, encoding="utf-8") as file:
                return [json.loads(line) for line in file.read().split("\n")[:-1]]
        return []


def last_error(output: bytes) -> str | None:
    """Return the last one-line error in the output of one of this project's programs, or None."""
    lines = output.decode(errors="replace").splitlines()
    errors = [line.removeprefix(ERROR).strip() for line in lines if line.startswith(ERROR)]
    return errors[-1] if errors and "Traceback (" not in errors[-1] else None


def launch(command: Sequence[str], env: Mapping[str, str], output: Any) -> subprocess.Popen:
    """Start a program that ends with this process and does not receive the terminal's Ctrl-C.

    Call it on a thread that outlives the program: the kernel takes the end of that thread for the
    end of this process.

    Args:
      command: The command line.
      env: The environment.
      output: The file for stdout and stderr, or subprocess.PIPE.
    """
    # mpirun forwards this signal to the ranks. It asks them to save and exit.
    save_and_exit = ends_with_this_process(signal.SIGUSR2)
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True, preexec_fn=save_and_exit,
    )  # fmt: skip


def _command(slots: TrialSlots, program: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a job."""
    if slots[0].host is None:
        num_ranks = slots[0].count
        launcher = mpirun_command(num_ranks) if num_ranks > 1 else []
        return [*launcher, *program], environment(**slots[0].variables())
    command: list[str] = []
    for own in slots:
        hosts = f"{own.host}:{own.count}"
        if command:
            command += [":", *ranks_on(own.count, hosts)]
        else:
            command += mpirun_command(own.count, hosts)
        # Each host has its own cores and GPUs.
        for name, value in own.variables().items():
            command += ["-x", f"{name}={value}"]
        command += program
    return command, environment()


def _changed_fields(base: Config, config: Config) -> list[str]:
    """Return the flags that turn the config of the config file into the config of the trial."""
    values, before = dataclasses.asdict(config), dataclasses.asdict(base)
    return [flag(name, value) for name, value in values.items() if value != before[name]]


def flag(name: str, value: Any) -> str:
    """Return the flag of `lm.train` that sets a field to a value."""
    if isinstance(value, bool):
        return f"--{'' if value else 'no'}{name}"
    return f"--{name}={value!r}" if isinstance(value, float) else f"--{name}={value}"
