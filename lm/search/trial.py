"""The job of a trial: `lm.train` in the slots of the trial."""

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from typing import NamedTuple

from lm import logger
from lm.config import Config, RunOptions
from lm.distributed.mpirun import mpirun_command, mpirun_environment, ranks_on
from lm.errors import ERROR, UserError, without_secrets
from lm.events.read import Event, iterate_events
from lm.files import locked, no_link
from lm.record import LOCK_FILE
from lm.search.settings import CONSOLE_FILE, as_flags
from lm.search.slots import TrialSlots
from lm.search.study import Search
from lm.system import ends_with_this_process


class Outcome(NamedTuple):
    """The end of a job."""

    kind: str  # "finished", "stopped" or "failed"
    reason: str = ""  # one line, if the job failed
    is_user_error: bool = False  # whether a retry would fail with the same error


class Validation(NamedTuple):
    """A validation of a run."""

    epochs: float | None  # trained epochs at the end of an epoch or of the run; otherwise None
    perplexity: float


class TrialJob:
    """A job of a trial of a search, in the slots of the trial."""

    def __init__(self, directory: str, config: Config, search: Search, slots: TrialSlots):
        self.directory, self.slots = directory, slots
        before = dataclasses.asdict(search.file.config)
        used = {k: v for k, v in dataclasses.asdict(config).items() if k not in config.unused}
        changes = {k: v for k, v in used.items() if v != before[k]}
        options = {"keep_checkpoints": 1, **changes, **search.settings.given(RunOptions)}
        self._program = [
            sys.executable, "-m", "lm.train", "--config", search.file.path,
            *as_flags(options),
            "--test_on", "none", "--output_dir", directory, "--resume",
        ]  # fmt: skip
        self._console = os.path.join(directory, CONSOLE_FILE)
        self._process: subprocess.Popen | None = None
        self._has_warned, self._asked_to_stop, self._num_seen = False, False, 0

    def poll(self) -> bool:
        """Start the job once the trial's previous job has saved, and return False after its end.

        Call this on the main thread: the kernel stops the job when the thread that starts it ends.
        """
        if self._process is None:
            os.makedirs(self.directory, exist_ok=True)
            if not self._is_locked():
                self._start()
            return True
        return self._process.poll() is None

    def _is_locked(self) -> bool:
        lock = os.path.join(self.directory, LOCK_FILE)
        try:
            with locked(lock):
                return False
        except BlockingIOError:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "waiting for the job that is using %s. If its host has died, an NFS server may"
                    " keep its lock: remove %s",
                    self.directory,
                    lock,
                )
            return True

    def _start(self) -> None:
        self._num_earlier_events = len(self._events())
        command, env = self._command()
        with open(self._console, "ab", opener=no_link) as console:
            # A user can continue the run with this command.
            text = without_secrets(shlex.join(["python", *self._program[1:]]))
            console.write(f"{text}\n".encode("utf-8", "surrogateescape"))
            console.flush()
            self._console_start = console.tell()
            # mpirun forwards SIGUSR2 to the ranks, which save and exit. The terminal's Ctrl-C must
            # not reach the job.
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                start_new_session=True, preexec_fn=ends_with_this_process(signal.SIGUSR2),
            )  # fmt: skip

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment of the job."""
        first = self.slots[0]
        if first.host is None:
            launcher = mpirun_command(first.count) if first.count > 1 else []
            return [*launcher, *self._program], mpirun_environment(**first.variable)
        command: list[str] = []
        for own in self.slots:
            start = ranks_on if command else mpirun_command
            command += [":"] if command else []
            command += start(own.count, f"{own.host}:{own.count}")
            for name, value in own.variable.items():  # differs between hosts
                command += ["-x", f"{name}={value}"]
            command += self._program
        return command, mpirun_environment(",".join(own.host for own in self.slots))

    def stop(self, wait: bool = False) -> None:
        """Make the job save and exit."""
        if self._process and self._process.poll() is None and not self._asked_to_stop:
            self._asked_to_stop = True
            self._process.send_signal(signal.SIGUSR2)
        if self._process and wait:
            self._process.wait()

    def validations(self) -> list[Validation]:
        """Return all validations of the run."""
        return [
            Validation(event.get("epochs"), event["valid_perplexity"])
            for event in self._events()
            if event["event"] in ("epoch", "validation") and "valid_perplexity" in event
        ]

    def new_validations(self) -> list[Validation]:
        """Return the validations that are new since the last call."""
        found = self.validations()
        new, self._num_seen = found[self._num_seen :], len(found)
        return new

    def outcome(self) -> Outcome:
        """Return the outcome of the job after its end.

        A run reports its outcome in the last event of metrics.jsonl. A job that fails before its
        run starts writes no event, but it may print an error. If the run is already finished, the
        job writes no event and succeeds.
        """
        events, exit_code = self._events()[self._num_earlier_events :], self._process.poll()
        end = events[-1] if events else {}
        is_finished = end.get("outcome") == "finished" or exit_code == 0
        if is_finished and self.validations():
            return Outcome("finished")
        reason = end.get("reason") if end.get("outcome") == "failed" else self._last_error()
        if self._asked_to_stop and not reason:
            return Outcome("stopped")
        unknown = f"exit code {exit_code}; see the trial's {CONSOLE_FILE}"
        return Outcome("failed", reason or unknown, exit_code == UserError.exit_code)

    def _last_error(self) -> str:
        with open(self._console, encoding="utf-8", errors="replace") as file:
            file.seek(self._console_start)
            errors = [line for line in file if line.startswith(ERROR)]
        return errors[-1].removeprefix(ERROR).strip() if errors else ""

    def _events(self) -> list[Event]:
        with contextlib.suppress(OSError):
            return list(iterate_events(self.directory, {}, with_steps=False))
        return []
