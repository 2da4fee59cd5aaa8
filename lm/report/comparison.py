"""The metrics of runs: which runs are comparable, and how much they differ."""

import glob
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lm import logger
from lm.config import Config
from lm.errors import UserError, printable
from lm.events.read import Event, read_events
from lm.record import RUN_FILE, RunRecord, first_difference, load_record, may_differ

# Fields that may differ between equal runs. All other fields are bitwise equal.
_MEASURED = {"tokens_per_second", "exchange_share", "epoch_seconds", "world_size", "memory_mb"}
_EVENTS = "step", "validation", "epoch", "test"


class RunMetrics(NamedTuple):
    """A run, as far as its files describe it. A run may be unfinished."""

    directory: str
    record: RunRecord
    starts: Sequence[Event]  # one for each start of the run
    events: Sequence[Event]  # step, epoch and test events
    end: Event  # the last end event; empty if the run is running, or was killed

    @property
    def identity(self) -> dict[str, Any]:
        """The common facts of a group of runs: the config, and the config file if it matters."""
        file = self.record.config_file
        files = {"config_file": file.sha256, **file.loaded} if file else {}
        return {**self.record.config, **{name: value[:12] for name, value in files.items()}}

    @property
    def name(self) -> str:
        """The directory as the user wrote it."""
        return printable(self.directory.rstrip("/"))

    @property
    def start(self) -> Event:
        """The last start event, with the number of ranks, the hosts and the versions."""
        return self.starts[-1] if self.starts else {}

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
        return max((event["step"] for event in self.events), default=0)

    @property
    def steps_text(self) -> str:
        """The steps out of those that the config plans."""
        planned = self.record.config["num_epochs"] * self.start.get("steps_per_epoch", 0)
        return f"{self.step:,} of {planned:,}" if planned else f"{self.step:,}"

    @property
    def outcome(self) -> str:
        """How the run ended, with the reason."""
        reason = f": {self.end['reason']}" if "reason" in self.end else ""
        return f"{self.end.get('outcome', 'running or killed')}{reason}"

    @property
    def exact(self) -> str:
        """Whether the last start was exact: "yes", "no" or "-"."""
        return str(self.start.get("exact", "-")).partition(":")[0]

    @property
    def test(self) -> Event:
        """The last test event, or an empty event."""
        return next((e for e in reversed(self.events) if e["event"] == "test"), {})

    @property
    def tested_epoch(self) -> Event:
        """The last epoch, or the best validation if the run tested these weights."""
        if self.test.get("test_on") == "best":
            validated = [e for e in self.events if e["event"] in ("epoch", "validation")]
            return min(validated, key=lambda e: e.get("valid_perplexity", math.inf), default={})
        return self.epochs[-1] if self.epochs else {}

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
        epochs = [e for e in self.epochs if e.get("world_size", 1) == self.num_ranks]
        seconds = sum(epoch["epoch_seconds"] for epoch in epochs)
        tokens = sum(epoch["epoch_seconds"] * epoch["tokens_per_second"] for epoch in epochs)
        return tokens / seconds if seconds else None

    @property
    def seconds_per_epoch(self) -> float | None:
        """The time of a full epoch at the mean speed. `--max_steps` may have cut the last epoch."""
        tokens_per_step = self.record.config["batch_size"] * self.record.config["num_steps"]
        tokens = self.start.get("steps_per_epoch", 0) * tokens_per_step
        speed = self.tokens_per_second
        return tokens / speed if tokens and speed else None


def num_ranks_text(count: int) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{count} rank{'s' * (count > 1)}"


def read_run(directory: str) -> RunMetrics:
    """Read the record and the events of a run."""
    record = load_record(directory)
    if record is None:
        raise UserError(f"{directory} is not a run: it has no {RUN_FILE}")
    try:
        found, damage = read_events(directory)
    except OSError as error:
        raise UserError(f"{directory} is not a run: {error.filename}: {error.strerror}") from error
    if damage:
        logger.warning("%s", damage)
    starts = [event for event in found if event["event"] == "start"]
    events = [event for event in found if event["event"] in _EVENTS]
    end = found[-1] if found and found[-1]["event"] == "end" else {}
    steps_per_epoch = starts[-1].get("steps_per_epoch") if starts else None
    for event in events:
        if event["event"] == "epoch":  # older versions wrote no fraction
            epochs = event["step"] / steps_per_epoch if steps_per_epoch else event["epoch"]
            event.setdefault("epochs", epochs)
    return RunMetrics(directory, record, starts, events, end)


def find_runs(directory: str) -> list[str]:
    """Return the directory of a run, or the directories of the runs in a directory."""
    files = sorted(glob.glob(os.path.join(glob.escape(directory), "*", RUN_FILE)))
    is_run = os.path.exists(os.path.join(directory, RUN_FILE))
    return [directory] if is_run or not files else [os.path.dirname(file) for file in files]


class Group(NamedTuple):
    """Runs of the same config, sorted by their number of ranks."""

    label: str
    runs: Sequence[RunMetrics]

    def seconds_per_epoch(self, num_ranks: int) -> float | None:
        """Return the mean over the runs on `num_ranks` ranks, or None if they have no epoch."""
        found = [r.seconds_per_epoch for r in self.runs if r.num_ranks == num_ranks]
        found = [seconds for seconds in found if seconds is not None]
        return sum(found) / len(found) if found else None

    def speedup(self, run: RunMetrics) -> float | None:
        """Return the time per epoch on one rank divided by the time of a run; None if unknown."""
        alone, seconds = self.seconds_per_epoch(1), run.seconds_per_epoch
        return alone / seconds if alone and seconds else None


class Section(NamedTuple):
    """Runs with the same corpus and vocabulary, whose perplexities are comparable."""

    corpus: str  # the name in a report
    groups: Sequence[Group]


def group_by_corpus(runs: Sequence[RunMetrics]) -> list[Section]:
    """Group runs by corpus, in the order in which the corpora first appear."""
    sections: dict[str, list[RunMetrics]] = {}
    for run in runs:
        sections.setdefault(run.record.corpus.sha256, []).append(run)
    return [
        Section(_corpus_name(members[0]), group_by_config(members)) for members in sections.values()
    ]


def runs_by_text(sections: Sequence[Section]) -> list[list[RunMetrics]]:
    """Return the runs of each text that occurs in several sections, with different tokenizers."""
    texts: dict[str | None, list[RunMetrics]] = {}
    for group in itertools.chain.from_iterable(section.groups for section in sections):
        for run in group.runs:
            texts.setdefault(run.record.corpus.text_sha256, []).append(run)
    texts.pop(None, None)  # the unknown texts of older versions
    return [runs for runs in texts.values() if len({run.record.corpus.sha256 for run in runs}) > 1]


def _corpus_name(run: RunMetrics) -> str:
    corpus = run.record.corpus
    parts = [corpus.kind]
    if "vocab_size" in run.start:
        parts.append(f"vocabulary of {run.start['vocab_size']:,}")
    return printable(", ".join([*parts, corpus.path, f"SHA-256 {corpus.sha256[:8]}"]))


def group_by_config(runs: Sequence[RunMetrics]) -> list[Group]:
    """Group runs by config, in the order in which the configs first appear.

    The labels of configs with the same name contain the fields in which they differ.
    """
    groups: dict[str, list[RunMetrics]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.identity, sort_keys=True), []).append(run)
    labels = _labels([members[0].identity for members in groups.values()])
    return [
        Group(label, sorted(members, key=lambda run: run.num_ranks))
        for label, members in zip(labels, groups.values())
    ]


def _labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    labels = []
    for config in configs:
        namesakes = [other for other in configs if other.get("name") == config.get("name")]
        details = ", ".join(
            f"{name}={config.get(name)}"
            for name in sorted(set().union(*namesakes))
            if any(other.get(name) != config.get(name) for other in namesakes)
        )
        name = str(config.get("name", "?"))
        labels.append(printable(f"{name} ({details})" if details else name))
    return labels


def comparable_pairs(groups: Sequence[Group]) -> Iterator[tuple[RunMetrics, RunMetrics]]:
    """Yield the pairs of runs whose settings agree, although one run may have more steps."""
    runs = [run for group in groups for run in group.runs]
    for first, second in itertools.combinations(runs, 2):
        ignored = may_differ("compare", Config, config=first.record.config)
        if first_difference(first.record, second.record, ignored) is None:
            yield first, second


def compare(first: RunMetrics, second: RunMetrics) -> str:
    """Compare all numbers of two runs bitwise, in the events that both have.

    Return "bitwise identical in 30 events", or the first event and field that differ.
    """
    events, others = _events_by_steps(first), _events_by_steps(second)
    shared = [(event, others[key]) for key, event in events.items() if key in others]
    if not shared:
        return "not comparable, because they have no event with the same steps"
    for number, (event, other) in enumerate(shared, start=1):
        # A run with --noeval, or of an older version, has fewer fields.
        for field in (name for name in event if name in other and name not in _MEASURED):
            value, other_value = event[field], other[field]
            if value != other_value:  # JSON preserves floats exactly
                kind = event["event"]
                name = f"{kind} {event[kind]}" if kind in event else f"the {kind}"
                return (
                    f"the first difference, in event {number} of {len(shared)}, is {field} of"
                    f" {name}: {value} and {other_value}"
                )
    counts = len(first.events), len(second.events)
    rest = "" if max(counts) == len(shared) else " (the first has {}, the second {})"
    text = f"{len(shared)} event{'s' * (len(shared) > 1)}"
    return f"bitwise identical in {text}{rest.format(*counts)}"


def _events_by_steps(run: RunMetrics) -> dict[tuple, Event]:
    found, previous = {}, 0
    for event in run.events:
        kind, step = event["event"], event["step"]
        # A loss is the mean over the steps since the previous step event.
        since = previous if kind == "step" else None
        found[kind, event.get("epoch"), since, step, event.get("test_on", "last")] = event
        if kind == "step":
            previous = step
    return found
