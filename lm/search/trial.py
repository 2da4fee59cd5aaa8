"""The job of a trial: `lm.train` on the cores and GPUs of one or more hosts.

Two trials never share a GPU or a slot of a host. They share a core only on hosts of `--hosts` that
have fewer cores than slots.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from lm.config import Config
from lm.distributed import launch
from lm.distributed.devices import HOST_SLOTS, count_cores, count_gpus, named_gpus
from lm.errors import ERROR, UserError
from lm.files import locked
from lm.record import LOCK_FILE, METRICS_FILE
from lm.search.options import CONSOLE_FILE
from lm.system import ends_with_this_process

_PROBE_SECONDS = 30


class HostSlots(NamedTuple):
    """Consecutive slots of a host. Each slot takes one rank, and has its own cores and GPU."""

    host: str | None  # None: this host
    first: int
    count: int
    total: int  # slots of the host

    def variables(self) -> dict[str, str]:
        """Return the environment variables that restrict the ranks to these slots."""
        found = {HOST_SLOTS: f"{self.first}:{self.count}:{self.total}"}
        gpus = _gpus(self.host, self.total)
        if gpus is not None:
            own = gpus[self.first : self.first + self.count]
            found["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        return found


TrialSlots = tuple[HostSlots, ...]  # the slots of one trial, on one or more hosts


def divide_hosts(
    ranks_per_trial: int, parallel_trials: int | None, hosts: str | None
) -> list[TrialSlots]:
    """Divide the hosts among the trials that run at the same time; see `SearchOptions`."""
    num_trials = parallel_trials or 1
    totals: collections.Counter = collections.Counter()  # slots of each host
    if hosts is None:
        totals[None] = num_trials * ranks_per_trial
        if count_cores() < num_trials:
            raise UserError(
                f"{num_trials} trials at a time need {num_trials} cores, and this host has"
                f" {count_cores()}; lower --parallel_trials"
            )
    else:
        for part, count in zip(hosts.split(","), launch.slots_of_hosts(hosts)):
            totals[part.partition(":")[0]] += count
        num_trials = parallel_trials or max(1, totals.total() // ranks_per_trial)
    if hosts or ranks_per_trial > 1:
        launch.mpirun_command(1)  # raises an error if mpirun is missing
    slots = [(host, slot) for host, total in totals.items() for slot in range(total)]
    if len(slots) < num_trials * ranks_per_trial:
        raise UserError(
            f"hosts {hosts} have {len(slots)} slots, too few for {num_trials} trial(s) of"
            f" {ranks_per_trial} ranks at a time"
        )
    _check_gpus(totals)
    divided = []
    for trial in range(num_trials):
        own = slots[trial * ranks_per_trial : (trial + 1) * ranks_per_trial]
        by_host = {host: [slot for name, slot in own if name == host] for host, _ in own}
        divided.append(
            tuple(HostSlots(host, s[0], len(s), totals[host]) for host, s in by_host.items())
        )
    return divided


def _gpus(host: str | None, num_slots: int) -> list[str] | None:
    """Return the GPUs that trials may use on a host, or None if the host has no GPU."""
    if named_gpus() is not None:
        return named_gpus()
    return list(map(str, range(count_gpus() if host is None else num_slots))) or None


def _check_gpus(totals: Mapping[str | None, int]) -> None:
    for host, num_slots in totals.items():
        gpus = _gpus(host, num_slots)
        if gpus and host and not all(name.isdigit() for name in gpus):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={','.join(gpus)} names GPUs of this host; with --hosts, use"
                " numbers, which are valid on all hosts"
            )
        if gpus and len(gpus) < num_slots:
            raise UserError(
                f"{num_slots} ranks on {host or 'this host'} need {num_slots} GPUs, and"
                f" {len(gpus)} are visible; use fewer ranks, or hide the GPUs with"
                " CUDA_VISIBLE_DEVICES="
            )


def lost_hosts(slots: TrialSlots) -> list[str]:
    """Return the hosts of a trial on which mpirun can no longer start a process."""
    lost = []
    for host in filter(None, (own.host for own in slots)):
        command = [*launch.mpirun_command(1, f"{host}:1"), "true"]
        quiet = {"stdin": subprocess.DEVNULL, "capture_output": True}
        try:
            subprocess.run(command, env=_environment(), check=True, timeout=_PROBE_SECONDS, **quiet)
        except subprocess.SubprocessError:
            lost.append(host)
    return lost


def _environment(**changes: str) -> dict[str, str]:
    # With the variables of a launcher above this process, the ranks would join its job.
    from_launcher = ("PMIX_", "ORTE_", "OMPI_COMM_")
    found = launch.mpirun_environment(**changes)
    return {name: value for name, value in found.items() if not name.startswith(from_launcher)}


class Outcome(NamedTuple):
    """The end of a job."""

    kind: str  # "finished", "stopped" or "failed"
    reason: str = ""  # one line, if the job failed
    is_user_error: bool = False  # whether a retry would fail with the same error


class TrialJob:
    """The job of a trial of an `lm.search.study.Search`. A job that ended can start again."""

    def __init__(self, directory: str, config: Config, search: Any, test_on: str):
        self.directory, self.config = directory, config
        self.reported: set[int] = set()  # epochs that the driver has reported to the study
        before = dataclasses.asdict(search.file.config)
        changes = {k: v for k, v in dataclasses.asdict(config).items() if v != before[k]}
        options = {**changes, **search.settings.run}
        self._program = [
            sys.executable, "-m", "lm.train", "--config", search.file.path,
            *itertools.starmap(flag, options.items()),
            "--test_on", test_on, "--output_dir", directory, "--resume",
        ]  # fmt: skip
        self._console = os.path.join(directory, CONSOLE_FILE)
        self._metrics = os.path.join(directory, METRICS_FILE)
        self._process: subprocess.Popen | None = None

    def start(self, slots: TrialSlots) -> bool:
        """Start the job and return True, unless the previous job of the trial is still saving.

        Call this on a thread that outlives the job: the kernel stops the job when the thread ends.
        """
        os.makedirs(self.directory, exist_ok=True)
        try:
            with locked(os.path.join(self.directory, LOCK_FILE)):
                pass
        except BlockingIOError:
            return False
        self._asked_to_stop, self._events_at_start = False, self._events()
        command, env = self._command(slots)
        with open(self._console, "ab") as console:
            # A user can continue the run with this command.
            text = shlex.join(["python", *self._program[1:]])
            console.write(f"{text}\n".encode("utf-8", "surrogateescape"))
            console.flush()
            self._console_start = console.tell()
            # mpirun forwards SIGUSR2 to the ranks, which save and exit. The terminal's Ctrl-C must
            # not reach the job.
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                start_new_session=True, preexec_fn=ends_with_this_process(signal.SIGUSR2),
            )  # fmt: skip
        return True

    def _command(self, slots: TrialSlots) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment of the job."""
        if slots[0].host is None:
            num_ranks = slots[0].count
            launcher = launch.mpirun_command(num_ranks) if num_ranks > 1 else []
            return [*launcher, *self._program], _environment(**slots[0].variables())
        command: list[str] = []
        for own in slots:
            hosts = f"{own.host}:{own.count}"
            if command:
                command += [":", *launch.ranks_on(own.count, hosts)]
            else:
                command += launch.mpirun_command(own.count, hosts)
            for name, value in own.variables().items():  # differs between hosts
                command += ["-x", f"{name}={value}"]
            command += self._program
        return command, _environment()

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, wait: bool = False) -> None:
        """Make the job save and exit."""
        if self.is_running() and not self._asked_to_stop:
            self._asked_to_stop = True
            self._process.send_signal(signal.SIGUSR2)
        if wait and self._process:
            self._process.wait()

    def perplexities(self) -> dict[int, float]:
        """Return the validation perplexity of each epoch."""
        return {
            event["epoch"]: event["valid_perplexity"]
            for event in self._events()
            if event.get("event") == "epoch" and "valid_perplexity" in event
        }

    def test_perplexity(self) -> float:
        """Return the result of the test of a finished job."""
        return next(e["test_perplexity"] for e in self._events() if e["event"] == "test")

    def outcome(self) -> Outcome:
        """Return the outcome of the job after its end.

        A run reports its outcome in the last event of metrics.jsonl. A job that fails before its
        run starts writes no event, but it may print an error.
        """
        exit_code, events = self._process.poll(), self._events()
        # If the events have not changed, the last event is from an earlier job.
        end = events[-1] if events and events != self._events_at_start else {}
        is_user_error = exit_code == UserError.exit_code
        if end.get("outcome") == "finished" and self.perplexities():
            return Outcome("finished")
        if end.get("outcome") == "failed":
            return Outcome("failed", end["reason"], is_user_error)
        with open(self._console, "rb") as file:
            file.seek(self._console_start)
            error = last_error(file.read())
        if self._asked_to_stop and not error:
            return Outcome("stopped")
        reason = error or f"exit code {exit_code}; see the trial's {CONSOLE_FILE}"
        return Outcome("failed", reason, is_user_error)

    def _events(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError):
            with open(self._metrics, encoding="utf-8") as file:
                # The run may be writing the last line.
                return [json.loads(line) for line in file.read().split("\n")[:-1]]
        return []


def last_error(output: bytes) -> str | None:
    """Return the last error line in the output of a job, or None."""
    lines = output.decode(errors="replace").splitlines()
    errors = [line.removeprefix(ERROR).strip() for line in lines if line.startswith(ERROR)]
    return errors[-1] if errors and "Traceback (" not in errors[-1] else None


def flag(name: str, value: Any) -> str:
    """Return the flag of `lm.train` that sets a field to a value."""
    if isinstance(value, bool):
        return f"--{'' if value else 'no'}{name}"
    return f"--{name}={value!r}" if isinstance(value, float) else f"--{name}={value}"
