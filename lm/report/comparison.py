"""Which runs are comparable, and whether their numbers are bitwise equal."""

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm.config import Config
from lm.errors import printable
from lm.events.read import Event
from lm.record import may_differ
from lm.report.metrics import RunMetrics

# Fields that may differ between equal runs. All other fields are bitwise equal.
MEASURED = {
    "tokens_per_second", "exchange_share", "share_of_gemm_peak", "epoch_seconds", "world_size",
    "memory_mb",
}  # fmt: skip
_KINDS = "step", "validation", "epoch", "test"  # the order of events after the same step


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

    @property
    def runs(self) -> list[RunMetrics]:
        return [run for group in self.groups for run in group.runs]


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
    for run in itertools.chain.from_iterable(section.runs for section in sections):
        texts.setdefault(run.record.corpus.text_sha256, []).append(run)
    texts.pop(None, None)  # the unknown texts of older versions
    return [runs for runs in texts.values() if len({run.record.corpus.sha256 for run in runs}) > 1]


def _corpus_name(run: RunMetrics) -> str:
    corpus = run.record.corpus
    parts = [corpus.kind]
    if "vocab_size" in run.start:
        parts.append(f"vocabulary of {run.start['vocab_size']:,}")
    return printable(", ".join([*parts, corpus.path, f"SHA-256 {corpus.sha256[:8]}"]))


def group_by_config(runs: Sequence[RunMetrics], ignored: Collection[str] = ()) -> list[Group]:
    """Group runs by config, in the order in which the configs first appear.

    The labels of configs with the same name contain the fields in which they differ. Runs that
    differ only in `ignored` fields are in the same group, and their label starts with the names of
    the first and the last run.
    """
    configs: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[RunMetrics]] = {}
    for run in runs:
        config = {name: value for name, value in run.identity.items() if name not in ignored}
        key = json.dumps(config, sort_keys=True)
        groups.setdefault(key, []).append(run)
        names = [str(each.identity.get("name", "?")) for each in (groups[key][0], run)]
        configs[key] = {**config, "name": " to ".join(dict.fromkeys(names))}
    return [
        Group(label, sorted(members, key=lambda run: run.num_ranks))
        for label, members in zip(_labels(list(configs.values())), groups.values())
    ]


def _labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    labels = []
    for config in configs:
        namesakes = [other for other in configs if other["name"] == config["name"]]
        details = ", ".join(
            f"{name}={config.get(name)}"
            for name in sorted(set().union(*namesakes))
            if any(other.get(name) != config.get(name) for other in namesakes)
        )
        name = config["name"]
        labels.append(printable(f"{name} ({details})" if details else name))
    return labels


def comparable_sets(groups: Sequence[Group]) -> list[list[RunMetrics]]:
    """Return the sets of runs whose settings agree, although some may have more steps."""
    sets: dict[str, list[RunMetrics]] = {}
    for run in itertools.chain.from_iterable(group.runs for group in groups):
        ignored = may_differ("compare", Config, config=run.record.config)
        facts = {name: fact for name, fact in run.record.facts.items() if name not in ignored}
        facts |= {**run.record.files, "init_from": run.identity.get("init_from")}
        sets.setdefault(json.dumps(facts, sort_keys=True), []).append(run)
    return [runs for runs in sets.values() if len(runs) > 1]


def identical_sets(runs: Sequence[RunMetrics]) -> list[list[RunMetrics]]:
    """Divide comparable runs into sets of bitwise identical runs, with the longest run first."""
    sets: list[list[RunMetrics]] = []
    for run in sorted(runs, key=lambda run: -run.step):
        same = (found for found in sets if compare(found[0], run).startswith(IDENTICAL))
        if (found := next(same, None)) is None:
            sets.append([run])
        else:
            found.append(run)
    return sets


IDENTICAL = "bitwise identical"


Position = tuple[int, int]  # the step of an event, and the index of its kind in `_KINDS`


def compare(first: RunMetrics, second: RunMetrics) -> str:
    """Compare all numbers of two runs bitwise, in the events that both have.

    Return "bitwise identical in 30 events", or the first event and field that differ.
    """
    mine, theirs = _shared_steps(first.steps, second.steps)
    events, others = _events_by_position(first), _events_by_position(second)
    shared = [position for position in events if position in others]
    count = len(mine) + len(shared)
    if not count:
        return "not comparable, because they have no event with the same steps"
    differences = _different_steps(first.steps, second.steps, mine, theirs)
    for position in shared:
        event, other = events[position], others[position]
        # A run with --noeval has fewer fields.
        for field in (name for name in event if name in other and name not in MEASURED):
            if event[field] != other[field]:  # JSON preserves floats exactly
                kind = event["event"]
                name = f"{kind} {event[kind]}" if kind in event else f"the {kind}"
                differences.append((position[0], f"{field} of {name}", event[field], other[field]))
    if differences:
        _, name, value, other = min(differences, key=lambda found: found[0])
        return f"the first difference in {count} events is {name}: {value} and {other}"
    counts = [len(run.events) + len(run.steps["step"]) for run in (first, second)]
    rest = "" if max(counts) == count else " (the runs have {} and {})"
    return f"{IDENTICAL} in {count} event{'s' * (count > 1)}{rest.format(*counts)}"


def _shared_steps(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the step events that average over the same steps in two runs."""
    _, mine, theirs = np.intersect1d(first["step"], second["step"], return_indices=True)
    # A loss is the mean over the steps since the previous step event.
    same_start = np.insert(first["step"], 0, 0)[mine] == np.insert(second["step"], 0, 0)[theirs]
    epochs, others = (steps.get("epoch", steps["step"]) for steps in (first, second))
    same = same_start & (epochs[mine] == others[theirs])
    return mine[same], theirs[same]


def _different_steps(
    first: Mapping[str, np.ndarray],
    second: Mapping[str, np.ndarray],
    mine: np.ndarray,
    theirs: np.ndarray,
) -> list[tuple[Position, str, float, float]]:
    """Return the first difference of each field in shared step events."""
    found = []
    for field in (name for name in first if name in second and name not in MEASURED):
        values, others = first[field][mine], second[field][theirs]
        differ = (values != others) & ~np.isnan(values) & ~np.isnan(others)
        if differ.any():
            at = int(differ.argmax())
            step = int(first["step"][mine[at]])
            name = f"{field} of step {step}"
            found.append(((step, 0), name, float(values[at]), float(others[at])))
    return found


def _events_by_position(run: RunMetrics) -> dict[tuple, Event]:
    """Return all events except steps. The keys start with their positions."""
    return {
        (
            (event["step"], _KINDS.index(event["event"])),
            event.get("epoch"),
            event.get("test_on", "last"),
        ): event
        for event in run.events
    }
