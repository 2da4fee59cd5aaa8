"""The jobs of a trial: `lm.train`, on one rank or under mpirun, in the trial's run directory."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import optuna

from lm import run_files
from lm.config import Config
from lm.distributed.launch import mpirun_command, ranks_on
from lm.errors import ERROR, ProgramExit
from lm.files import locked
from lm.report.metrics import read_run
from lm.search.places import Place, environment
from lm.search.prepare import Prepared
from lm.system import ends_with_this_process

_ERROR = re.compile(rf"^{ERROR}(.*)$", re.MULTILINE)
# What a traceback ends with; it may tell of several.
_EXCEPTION = re.compile(r"^([\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)$", re.MULTILINE)
_KILLED = re.compile(r"^mpirun noticed that (.*)$", re.MULTILINE)


class Job:
    """A trial that runs, or is about to.

    Args:
      trial: Optuna's.
      config: What is trained.
      search: For its config file, and the options of all trials.
      directory: Of the trial's run.
      place: Where it runs.
    """

    def __init__(
        self,
        trial: optuna.Trial,
        config: Config,
        search: Prepared,
        directory: str,
        place: Place,
    ):
        self.trial, self.config, self.directory, self.place = trial, config, directory, place
        self.asked_to_stop = False
        self._program = [
            sys.executable, "-m", "lm.train", "--config", search.file.path,
            *_flags(search.file.config, config),
            *(flag(name, value) for name, value in search.settings.run.items()),
            "--test_on", "none",
            "--output_dir", directory, "--resume",
        ]  # fmt: skip
        self._console = os.path.join(directory, run_files.CONSOLE)
        self._console_start = 0
        self._process: Optional[subprocess.Popen] = None
        self._metrics_seen: Any = None

    def start(self) -> None:
        """Start it, unless what is left of an earlier job is still saving: then, try again."""
        os.makedirs(self.directory, exist_ok=True)
        try:
            with locked(os.path.join(self.directory, run_files.LOCK)):
                pass
        except BlockingIOError:
            return
        with open(self._console, "ab") as console:
            # What goes on with it, also by hand.
            command = shlex.join(["python", *self._program[1:]])
            console.write(f"{command}\n".encode("utf-8", "surrogateescape"))
            console.flush()
            self._console_start = console.tell()
            self._process = launch(*_command(self.place, self._program), console)

    @property
    def has_started(self) -> bool:
        """Whether a process has been started."""
        return self._process is not None

    def exit_code(self) -> Optional[int]:
        """Return it, or None while it runs."""
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """Ask it to save and end."""
        self.asked_to_stop = True
        if self._process and self._process.poll() is None:
            # mpirun hands SIGUSR2 on at once; see lm/distributed/signals.py.
            self._process.send_signal(signal.SIGUSR2)

    def wait(self) -> None:
        """Wait for its end."""
        if self._process:
            self._process.wait()

    def again(self) -> None:
        """Let it be started once more, from its last checkpoint."""
        self._process, self.asked_to_stop = None, False

    def new_metrics(self) -> dict[int, float]:
        """Return the validation perplexity of each epoch, if a file has changed; else nothing."""
        try:
            state = os.stat(os.path.join(self.directory, run_files.METRICS))
            seen = state.st_size, state.st_mtime_ns
            if seen == self._metrics_seen:
                return {}
            found = valid_perplexities(self.directory)
        except (OSError, ProgramExit):  # it is about to be written, or cannot be read for a moment
            return {}
        self._metrics_seen = seen
        return found

    def failure(self) -> str:
        """Say in a line why it has ended: what `lm.train` said last, or else mpirun; the same of
        trials that fail alike."""
        with open(self._console, "rb") as file:
            file.seek(self._console_start)
            said = file.read().decode(errors="replace")
        return reason_in(said) or f"exit code {self.exit_code()}; see the trial's console.txt"


def reason_in(said: str) -> Optional[str]:
    """Return the last line in which one of our programs, or else mpirun, says why it ends."""
    for pattern in (_ERROR, _KILLED):
        found = list(pattern.finditer(said))
        if found:
            reason = found[-1][1].strip()
            exceptions = _EXCEPTION.findall(said[found[-1].end() :])
            return exceptions[-1] if "Traceback (" in reason and exceptions else reason
    return None


def valid_perplexities(directory: str) -> dict[int, float]:
    """Return the validation perplexity of each epoch of a run.

    Raises:
      UserError: The directory holds no run.
    """
    return {
        epoch["epoch"]: epoch["valid_perplexity"]
        for epoch in read_run(directory).epochs
        if "valid_perplexity" in epoch
    }


def launch(command: Sequence[str], env: Mapping[str, str], output: Any) -> subprocess.Popen:
    """Start a program that does not outlive this process, nor hears the Ctrl-C meant for it.

    Args:
      command: The program.
      env: Its environment.
      output: Where its stdout and stderr go.
    """
    # The signal that mpirun hands on to the ranks, and that asks them to save and end.
    follow_the_driver = ends_with_this_process(signal.SIGUSR2)
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True, preexec_fn=follow_the_driver,
    )  # fmt: skip


def _command(place: Place, program: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a job in a place, and its environment."""
    if place[0].host is None:
        ranks = place[0].count
        launcher = mpirun_command(ranks) if ranks > 1 else []
        return [*launcher, *program], environment(**place[0].variables())
    command: list[str] = []
    for share in place:
        hosts = f"{share.host}:{share.count}"
        command += (
            [":", *ranks_on(share.count, hosts)] if command else mpirun_command(share.count, hosts)
        )
        # Each host has cores and GPUs of its own to keep to.
        for name, value in share.variables().items():
            command += ["-x", f"{name}={value}"]
        command += program
    return command, environment()


def _flags(base: Config, config: Config) -> list[str]:
    """Return the flags that make a config of the one in the config file."""
    values, before = dataclasses.asdict(config), dataclasses.asdict(base)
    changed = {name: value for name, value in values.items() if value != before[name]}
    return [flag(name, value) for name, value in changed.items()]


def flag(name: str, value: Any) -> str:
    """Return a field and its value as `lm.train` reads them."""
    if isinstance(value, bool):
        return f"--{'' if value else 'no'}{name}"
    return f"--{name}={value!r}" if isinstance(value, float) else f"--{name}={value}"
