"""Runs side by side: which of them can be compared, and how far they differ."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from lm.cli.tables import printable
from lm.config import Config
from lm.options import may_change
from lm.record import first_difference
from lm.report.metrics import Event, RunMetrics

# What must be equal in two runs of a config; times, speeds and hosts need not be.
_EXACT_FIELDS = (
    "loss", "gradient_norm", "learning_rate", "train_perplexity", "valid_perplexity",
    "test_perplexity",
)  # fmt: skip


class Group(NamedTuple):
    """Runs of one config, fewest ranks first."""

    label: str
    runs: Sequence[RunMetrics]

    def seconds_per_epoch(self, num_ranks: int) -> Optional[float]:
        """Mean over the runs with so many ranks, or None if none of them has an epoch."""
        found = [r.seconds_per_epoch for r in self.runs if r.num_ranks == num_ranks]
        found = [seconds for seconds in found if seconds is not None]
        return sum(found) / len(found) if found else None

    def speed_up(self, run: RunMetrics) -> Optional[float]:
        """Time per epoch with one rank over that of a run; None without a run of one rank."""
        alone, seconds = self.seconds_per_epoch(1), run.seconds_per_epoch
        return alone / seconds if alone and seconds else None


class Section(NamedTuple):
    """Runs on one corpus and vocabulary: those whose perplexities can be compared."""

    corpus: str  # how a report calls it
    groups: Sequence[Group]


def group_by_corpus(runs: Sequence[RunMetrics]) -> list[Section]:
    """Put runs on the same corpus together, in the order in which corpora first appear."""
    sections: dict[str, list[RunMetrics]] = {}
    for run in runs:
        sections.setdefault(run.record.corpus.sha256, []).append(run)
    return [
        Section(_corpus_name(members[0]), group_by_config(members)) for members in sections.values()
    ]


def _corpus_name(run: RunMetrics) -> str:
    corpus = run.record.corpus
    parts = [corpus.kind]
    if "vocab_size" in run.start:
        parts.append(f"{run.start['vocab_size']:,} words")
    return printable(", ".join([*parts, corpus.path, f"SHA-256 {corpus.sha256[:8]}"]))


def group_by_config(runs: Sequence[RunMetrics]) -> list[Group]:
    """Put runs of the same config together, in the order in which configs first appear.

    Configs of the same name get the fields that tell them apart in their label.
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


def pairs_of(groups: Sequence[Group]) -> Iterator[tuple[RunMetrics, RunMetrics]]:
    """Return each two runs that do the same steps, one of them perhaps more."""
    runs = [run for group in groups for run in group.runs]
    ignored = may_change(Config, "resume")
    for first, second in itertools.combinations(runs, 2):
        if first_difference(first.record, second.record, ignored) is None:
            yield first, second


class Difference(NamedTuple):
    """How far the loss curves of two runs are apart."""

    num_points: int  # of the curves, that both runs have
    absolute: float  # the largest |loss - loss|, in nats per token
    relative: float  # the largest |loss - loss| / loss
    step: int  # where that is


def loss_difference(first: RunMetrics, second: RunMetrics) -> Optional[Difference]:
    """Compare the loss curves of two runs at the points that both have; None if there is none."""
    gaps = {}
    for event, other in _shared_events(first, second):
        loss, other_loss = event.get("loss"), other.get("loss")
        if loss is not None and other_loss is not None:
            gap = abs(loss - other_loss)
            gaps[event["step"]] = gap / max(loss, 1e-9), gap
    if not gaps:
        return None
    worst = max(gaps, key=gaps.__getitem__)
    largest = max(absolute for _, absolute in gaps.values())
    return Difference(len(gaps), largest, relative=gaps[worst][0], step=worst)


def exact_comparison(first: RunMetrics, second: RunMetrics) -> str:
    """Say whether all numbers of two runs are equal, in the events that both have.

    Returns:
      Such as "equal, bit for bit, in 30 events", or the first event and field that differ.
    """
    shared = _shared_events(first, second)
    if not shared:
        return "nothing to compare: they have no event of the same steps"
    for number, (event, other) in enumerate(shared, start=1):
        for field in _EXACT_FIELDS:
            value, other_value = event.get(field), other.get(field)
            if field == "valid_perplexity" and None in (value, other_value):
                continue  # --noeval: one has none
            if value != other_value:  # JSON carries floats exactly: equal numbers are equal bits
                kind = event["event"]
                name = f"{kind} {event[kind]}" if kind in event else f"the {kind}"
                return (
                    f"the first difference, in event {number} of {len(shared)}, is {field} of"
                    f" {name}: {value} and {other_value}"
                )
    counts = len(first.events), len(second.events)
    rest = "" if max(counts) == len(shared) else " (the first has {}, the second {})"
    shared_text = f"{len(shared)} event{'s' * (len(shared) > 1)}"
    return f"equal, bit for bit, in {shared_text}{rest.format(*counts)}"


def _shared_events(first: RunMetrics, second: RunMetrics) -> list[tuple[Event, Event]]:
    events, others = _by_steps(first), _by_steps(second)
    return [(event, others[key]) for key, event in events.items() if key in others]


def _by_steps(run: RunMetrics) -> dict[tuple, Event]:
    found, before = {}, 0
    for event in run.events:
        kind, step = event["event"], event["step"]
        # A loss is a mean over the steps since the last: over others it is another number.
        since = before if kind == "step" else None
        weights = event.get("test_on", "last")
        found[kind, event.get("epoch"), since, step, weights] = event
        if kind == "step":
            before = step
    return found
