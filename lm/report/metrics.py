"""What the files of a run say about it."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from lm import run_files
from lm.cli.tables import printable
from lm.errors import UserError
from lm.record import RunRecord, load_record

Event = Mapping[str, Any]  # a line of metrics.jsonl


class RunMetrics(NamedTuple):
    """A run, as its directory has it; the directory of an unfinished run says less."""

    directory: str
    record: RunRecord
    start: Event  # the last start event: world_size, hosts, versions
    # Step, epoch and test events in order, each with its step, its number of ranks (world_size),
    # and the step from which on it has been that (ranks_since).
    events: Sequence[Event]

    @property
    def config(self) -> Mapping[str, Any]:
        """The fields of the run's Config."""
        return self.record.config

    @property
    def identity(self) -> dict[str, Any]:
        """What a run of a group shares: the fields of the Config, and the config file if any."""
        file = self.record.config_file
        return {**self.config, **({"config_file": file.sha256[:12]} if file else {})}

    @property
    def name(self) -> str:
        """How a report calls it: by its directory, as it was given, on one line."""
        return printable(self.directory.rstrip("/"))

    @property
    def epochs(self) -> list[Event]:
        """The epoch events."""
        return [event for event in self.events if event["event"] == "epoch"]

    @property
    def tested_epoch(self) -> Event:
        """The last epoch; the best one, where it is what was tested (`--test_on best`)."""
        if self.last("test", "test_on") == "best":
            return min(self.epochs, key=_valid_perplexity, default={})
        return self.epochs[-1] if self.epochs else {}

    @property
    def num_ranks(self) -> int:
        """How many ranks the run had in its last epoch."""
        epochs = self.epochs
        return epochs[-1]["world_size"] if epochs else self.start.get("world_size", 1)

    @property
    def ranks_in_turn(self) -> list[int]:
        """How many ranks it had, and on how many others it was resumed, in order."""
        sizes = [event["world_size"] for event in self.events] or [self.num_ranks]
        return [size for size, _ in itertools.groupby(sizes)]

    @property
    def words_per_second(self) -> Optional[float]:
        """Mean training speed of all `num_ranks` together, or None before the end of an epoch."""
        # Epochs on other numbers of ranks, also in part, before it was resumed on these.
        length = self.start.get("steps_per_epoch", 0)
        epochs = [
            epoch
            for epoch in self.epochs
            if epoch["world_size"] == self.num_ranks
            and epoch["ranks_since"] <= (epoch["epoch"] - 1) * length
        ]
        seconds = sum(epoch["epoch_seconds"] for epoch in epochs)
        words = sum(epoch["epoch_seconds"] * epoch["words_per_second"] for epoch in epochs)
        return words / seconds if seconds else None

    @property
    def seconds_per_epoch(self) -> Optional[float]:
        """Training time of a whole epoch at the mean speed, also where --max_steps cut one off."""
        words_per_step = self.config.get("batch_size", 0) * self.config.get("num_steps", 0)
        words = self.start.get("steps_per_epoch", 0) * words_per_step
        speed = self.words_per_second
        return words / speed if words and speed else None

    def last(self, kind: str, field: str) -> Optional[Any]:
        """Return a field of the last event of a kind, or None."""
        told = [event for event in self.events if event["event"] == kind]
        return told[-1].get(field) if told else None


def _valid_perplexity(epoch: Event) -> float:
    return epoch.get("valid_perplexity") or math.inf


def read_run(directory: str) -> RunMetrics:
    """Read run.json and metrics.jsonl of a run.

    Raises:
      UserError: The directory holds no run, or a file in it is damaged.
    """
    path = os.path.join(directory, run_files.METRICS)
    record = load_record(directory)
    if record is None:
        raise UserError(f"{directory} is not a run: it has no {run_files.RUN}")
    try:
        with open(path, encoding="utf-8") as file:
            # The last line may be cut off, by a kill or because it is being written.
            events = _last_told(map(json.loads, file.read().split("\n")[:-1]))
        start = events.pop(("start", None), {})
        return RunMetrics(directory, record, start, list(events.values()))
    except OSError as error:
        raise UserError(f"{directory} is not a run: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error!r}") from error


def _last_told(events: Iterable[Event]) -> dict[tuple[str, Optional[int]], Event]:
    """Return the events by kind and number; resumed runs of old versions told some of them twice.

    An epoch or a test event of an older version gets the step of the last step event before it.
    All get the number of ranks of their start.
    """
    told: dict[tuple[str, Optional[int]], Event] = {}
    step, world_size, ranks_since = 0, 1, 0
    for event in events:
        kind = event["event"]
        if kind == "end":
            continue
        key = kind, event[kind] if kind in ("step", "epoch") else None
        step = event["step"] if kind == "step" else step
        if kind == "start" and event.get("world_size", 1) != world_size:
            world_size, ranks_since = event.get("world_size", 1), event.get("resumed_from_step", 0)
        told.pop(key, None)  # it counts where it was told last
        told[key] = {"step": step, "world_size": world_size, "ranks_since": ranks_since, **event}
    return told
