"""The metrics of a run, from the files in its run directory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lm import run_files
from lm.cli.tables import printable
from lm.errors import UserError
from lm.record import RunRecord, load_record

Event = Mapping[str, Any]  # a line of metrics.jsonl


class RunMetrics(NamedTuple):
    """A run, as far as its files describe it. A run may be unfinished."""

    directory: str
    record: RunRecord
    starts: Sequence[Event]  # one for each start of the run
    events: Sequence[Event]  # step, epoch and test events, with the start that they belong to

    @property
    def identity(self) -> dict[str, Any]:
        """The common facts of a group of runs: the config, and the config file if it matters."""
        file = self.record.config_file
        return {**self.record.config, **({"config_file": file.sha256[:12]} if file else {})}

    @property
    def name(self) -> str:
        """The name in a report: the directory as the user wrote it."""
        return printable(self.directory.rstrip("/"))

    @property
    def start(self) -> Event:
        """The last start event, with the number of ranks, the hosts and the versions."""
        return self.starts[-1] if self.starts else {}

    @property
    def epochs(self) -> list[Event]:
        """The epoch events."""
        return [event for event in self.events if event["event"] == "epoch"]

    @property
    def test(self) -> Event:
        """The last test event; empty if the run has none."""
        return next((e for e in reversed(self.events) if e["event"] == "test"), {})

    @property
    def tested_epoch(self) -> Event:
        """The last epoch, or the best epoch if the run tested its weights (`--test_on best`)."""
        if self.test.get("test_on") == "best":
            return min(self.epochs, key=_valid_perplexity, default={})
        return self.epochs[-1] if self.epochs else {}

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the last epoch."""
        start = self.epochs[-1]["start"] if self.epochs else self.start
        return start.get("world_size", 1)

    @property
    def ranks_text(self) -> str:
        """The number of ranks for tables, such as "2 ranks" or "1 to 4 ranks, 9 starts"."""
        sizes = {start["world_size"] for start in self.starts} or {1}
        if len(sizes) == 1:
            return num_ranks_text(*sizes)
        return f"{min(sizes)} to {num_ranks_text(max(sizes))}, {len(self.starts)} starts"

    @property
    def words_per_second(self) -> float | None:
        """The mean training speed of all `num_ranks` ranks, or None before the first epoch."""
        epochs = [epoch for epoch in self.epochs if self._is_on_last_ranks(epoch)]
        seconds = sum(epoch["epoch_seconds"] for epoch in epochs)
        words = sum(epoch["epoch_seconds"] * epoch["words_per_second"] for epoch in epochs)
        return words / seconds if seconds else None

    def _is_on_last_ranks(self, epoch: Event) -> bool:
        """Return whether all steps of an epoch ran on `num_ranks` ranks."""
        first_step = (epoch["epoch"] - 1) * self.start.get("steps_per_epoch", 0)
        since = epoch["start"].get("resumed_from_step", 0)
        on_other_ranks = [s for s in self.starts if s.get("world_size") != self.num_ranks]
        return epoch["start"].get("world_size", 1) == self.num_ranks and (
            since <= first_step or not on_other_ranks
        )

    @property
    def seconds_per_epoch(self) -> float | None:
        """The time of a full epoch at the mean speed. `--max_steps` may have cut the last epoch."""
        words_per_step = self.record.config["batch_size"] * self.record.config["num_steps"]
        words = self.start.get("steps_per_epoch", 0) * words_per_step
        speed = self.words_per_second
        return words / speed if words and speed else None


def num_ranks_text(count: int) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{count} rank{'s' * (count > 1)}"


def _valid_perplexity(epoch: Event) -> float:
    return epoch.get("valid_perplexity") or math.inf


def read_run(directory: str) -> RunMetrics:
    """Read the record and the events of a run.

    Raises:
      UserError: If the directory does not contain a run, or if a file is corrupt.
    """
    path = os.path.join(directory, run_files.METRICS)
    record = load_record(directory)
    if record is None:
        raise UserError(f"{directory} is not a run: it has no {run_files.RUN}")
    try:
        with open(path, encoding="utf-8") as file:
            # A kill may cut off the last line, or the run may be writing it.
            lines = file.read().split("\n")[:-1]
        starts: list[Event] = []
        events: list[Event] = []
        for event in map(json.loads, lines):
            if event["event"] == "start":
                starts.append(event)
            elif event["event"] != "end":
                event["step"] = int(event["step"])
                events.append({**event, "start": starts[-1] if starts else {}})
    except OSError as error:
        raise UserError(f"{directory} is not a run: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is corrupt: {error!r}") from error
    return RunMetrics(directory, record, starts, events)
