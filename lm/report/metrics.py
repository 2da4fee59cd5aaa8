"""The metrics of a run, read from its files."""

import array
import contextlib
import glob
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm.checkpoint.manifest import list_checkpoints
from lm.errors import UserError, printable
from lm.events.read import Event, describe_damage, iterate_events
from lm.record import RUN_FILE, RunRecord, load_existing_record

_EVENTS = "validation", "epoch", "test"


class RunMetrics(NamedTuple):
    """A run, as far as its files describe it. A run may be unfinished."""

    directory: str
    record: RunRecord
    starts: Sequence[Event]  # one for each start of the run
    events: Sequence[Event]  # validation, epoch and test events
    steps: Mapping[str, np.ndarray]  # the step events, by field: float64, NaN for a missing value
    damage: str | None  # a warning about damaged lines of its metrics
    end: Event  # the last end event; empty if the run is running, or was killed
    label: str | None = None  # a name instead of the directory

    @property
    def identity(self) -> dict[str, Any]:
        """The common facts of a group: the config, and files that change the network or weights."""
        file = self.record.config_file
        files = {"config_file": file.sha256, **file.loaded} if file else {}
        if init := self.record.init_from:
            checksums = json.dumps(init.sha256, sort_keys=True)
            files["init_from"] = hashlib.sha256(checksums.encode()).hexdigest()
        return {**self.record.settings, **{name: value[:12] for name, value in files.items()}}

    @property
    def name(self) -> str:
        """The label, or the directory as the user wrote it."""
        return printable(self.label or self.directory.rstrip("/"))

    @property
    def start(self) -> Event:
        """The last start event, with the number of ranks, the hosts and the versions."""
        return self.starts[-1] if self.starts else {}

    @property
    def start_facts(self) -> dict[str, Any]:
        """The fields of the last start event and of its provenance."""
        facts = {**self.start, **self.start.get("provenance", {})}
        facts.pop("provenance", None)
        return facts

    @property
    def epochs(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "epoch"]

    @property
    def num_epochs(self) -> float:
        """The number of epochs, including the part of the last epoch."""
        return self.epochs[-1]["epochs"] if self.epochs else 0

    @property
    def step(self) -> int:
        """The number of steps."""
        last = self.steps["step"].max(initial=0)
        return max([int(last), *(event["step"] for event in self.events)])

    @property
    def steps_text(self) -> str:
        """The completed and the planned steps."""
        config, steps_per_epoch = self.record.config, self.start.get("steps_per_epoch", 0)
        planned = config.get("num_steps_total") or config["num_epochs"] * steps_per_epoch
        return f"{self.step:,} of {planned:,}" if planned else f"{self.step:,}"

    @property
    def outcome(self) -> str:
        """How the run ended, with the reason."""
        reason = f": {self.end['reason']}" if "reason" in self.end else ""
        return f"{self.end.get('outcome', 'running or killed')}{reason}"

    @property
    def ended_early(self) -> bool:
        """Whether the training ended because the perplexity no longer improved."""
        return self.end.get("outcome") == "finished" and "reason" in self.end

    @property
    def exact(self) -> str:
        """Whether the last start was exact: "yes", "no" or "-"."""
        return str(self.start.get("exact", "-")).partition(":")[0]

    @property
    def test(self) -> Event:
        """The last test event, or an empty event."""
        return next((e for e in reversed(self.events) if e["event"] == "test"), {})

    @property
    def tests_best(self) -> bool:
        """Whether the run tested the weights with the best validation, and not the last weights."""
        return self.test.get("test_on") == "best"

    @property
    def tested_epoch(self) -> Event:
        """The last epoch, or the best validation if the run tested these weights."""
        if self.tests_best:
            validated = [e for e in self.events if e["event"] in ("epoch", "validation")]
            return min(validated, key=lambda e: e.get("valid_perplexity", math.inf), default={})
        return self.epochs[-1] if self.epochs else {}

    @property
    def valid_perplexity(self) -> float:
        """The validation perplexity of the tested weights, or infinity without a validation."""
        return self.tested_epoch.get("valid_perplexity", math.inf)

    @property
    def checkpoint_steps(self) -> list[int]:
        """The steps of the checkpoints in the run directory. They may be unreadable."""
        with contextlib.suppress(OSError):
            return [int(path.rpartition("-")[2]) for path in list_checkpoints(self.directory)]
        return []

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the last epoch."""
        last = self.epochs[-1] if self.epochs else self.start
        return last.get("world_size", 1)

    @property
    def ranks_text(self) -> str:
        """The number of ranks for tables, such as "2 ranks" or "1 to 4 ranks, 9 starts"."""
        sizes = {start["world_size"] for start in self.starts} or {1}
        if len(sizes) == 1:
            return num_ranks_text(*sizes)
        return f"{min(sizes)} to {num_ranks_text(max(sizes))}, {len(self.starts)} starts"

    @property
    def tokens_per_second(self) -> float | None:
        """The mean training speed of all `num_ranks` ranks, or None without such an epoch."""
        epochs = [
            e
            for e in self.epochs
            if e.get("world_size", 1) == self.num_ranks and not self._may_be_mixed(e)
        ]
        seconds = sum(epoch["epoch_seconds"] for epoch in epochs)
        tokens = sum(epoch["epoch_seconds"] * epoch["tokens_per_second"] for epoch in epochs)
        return tokens / seconds if seconds else None

    def _may_be_mixed(self, epoch: Event) -> bool:
        """Return whether different numbers of ranks may have computed parts of an epoch."""
        if len({start["world_size"] for start in self.starts}) < 2:
            return False
        begin = (epoch["epoch"] - 1) * self.start.get("steps_per_epoch", 0)
        resumed = [start.get("resumed_from_step", 0) for start in self.starts]
        return any(begin < step < epoch["step"] for step in resumed)

    @property
    def seconds_per_epoch(self) -> float | None:
        """The time of a full epoch at the mean speed. `--max_steps` may have cut the last epoch."""
        tokens = self.start.get("steps_per_epoch", 0) * self.tokens_per_step
        speed = self.tokens_per_second
        return tokens / speed if tokens and speed else None

    @property
    def tokens_per_step(self) -> int:
        return self.record.config["batch_size"] * self.record.config["num_steps"]

    def clock(self) -> tuple[np.ndarray, np.ndarray]:
        """Return steps, and the training time until each of them, from the speeds in the events.

        The speed in a step event is the mean since the previous step event. Epoch events repeat
        these steps, so only the epochs after the last step event count.
        """
        speeds = self.steps.get("tokens_per_second", np.empty(0))
        steps = self.steps["step"][: len(speeds)]
        epochs = [(e["step"], e["tokens_per_second"]) for e in self.epochs]
        later = [epoch for epoch in epochs if epoch[0] > steps.max(initial=0)]
        later = np.array(later, float).reshape(-1, 2).T
        measured = np.append(np.stack([steps, speeds]), later, axis=1)
        steps, speeds = measured[:, np.argsort(measured[0], kind="stable")]
        steps, speeds = steps[speeds > 0], speeds[speeds > 0]
        with np.errstate(over="ignore"):  # a damaged file may contain any number
            seconds = np.cumsum(np.diff(steps, prepend=0) * self.tokens_per_step / speeds)
        return np.insert(steps, 0, 0), np.insert(seconds, 0, 0)

    def seconds_to(self, perplexity: float) -> float | None:
        """Return the training time until a validation reaches a perplexity, or None."""
        reached = [
            e["step"] for e in self.events if e.get("valid_perplexity", math.inf) <= perplexity
        ]
        return self.seconds_at(reached[0]) if reached else None

    def seconds_at(self, step: int) -> float:
        """Return the training time until a step."""
        return float(np.interp(step, *self.clock()))


def num_ranks_text(count: int) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{count} rank{'s' * (count > 1)}"


def read_run(directory: str) -> RunMetrics:
    """Read the record and the events of a run."""
    record = load_existing_record(directory)
    starts, events, steps = [], [], _Columns("step")
    kept = {"start": starts, "step": steps, **dict.fromkeys(_EVENTS, events)}
    damaged: dict[int, str] = {}
    event: Event = {}
    try:
        for event in iterate_events(directory, damaged):
            if event["event"] in kept:
                kept[event["event"]].append(event)
    except OSError as error:
        raise UserError(f"{directory} is not a run: {error.filename}: {error.strerror}") from error
    damage = describe_damage(directory, damaged)
    end = event if event.get("event") == "end" else {}
    return RunMetrics(directory, record, starts, events, steps.arrays(), damage, end)


class _Columns:
    """Step events as columns. A million events as dictionaries would need several hundred MB."""

    def __init__(self, *names: str):
        self._columns = {name: array.array("d") for name in names}
        self._count = 0

    def append(self, event: Event) -> None:
        for name, value in event.items():
            if not isinstance(value, str):
                column = self._columns.get(name)
                if column is None or len(column) < self._count:
                    column = self._filled(name)
                column.append(value)
        self._count += 1

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.array(self._filled(name)) for name in self._columns}

    def _filled(self, name: str) -> array.array:
        """Return a column, with NaN for each earlier event that lacks the field."""
        column = self._columns.setdefault(name, array.array("d"))
        column.extend([math.nan] * (self._count - len(column)))
        return column


def find_runs(directory: str) -> list[str]:
    """Return the directory of a run, or the runs up to three levels below a directory."""
    levels = [["*"] * depth for depth in (1, 2, 3)]
    places = (os.path.join(glob.escape(directory), *level, RUN_FILE) for level in levels)
    files = sorted(file for place in places for file in glob.glob(place))
    is_run = os.path.exists(os.path.join(directory, RUN_FILE))
    return [directory] if is_run or not files else [os.path.dirname(file) for file in files]
