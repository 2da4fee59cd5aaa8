"""Runs side by side: read their metrics, put them in tables, and tell how far they differ."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from lm.cli.tables import printable
from lm.data.run_corpus import CorpusRecord, read_record
from lm.errors import UserError


class RunMetrics(NamedTuple):
    """What a run's directory says about it; a running or a stopped one says less."""

    directory: str
    config: Mapping[str, Any]
    start: Mapping[str, Any]  # the last start event: world_size, hosts, versions
    epochs: Sequence[Mapping[str, Any]]  # epoch events, in order
    losses: Mapping[int, float]  # step -> mean nll in nats of the steps since the one before
    test_perplexity: Optional[float]
    corpus: Optional[CorpusRecord] = None  # older versions kept none

    @property
    def num_ranks(self) -> int:
        """How many ranks the run had, the last time that it was started."""
        return self.start.get("world_size", 1)

    @property
    def words_per_second(self) -> Optional[float]:
        """Mean training speed of all ranks together, or None before the end of an epoch."""
        seconds = sum(epoch["epoch_seconds"] for epoch in self.epochs)
        words = sum(epoch["epoch_seconds"] * epoch["words_per_second"] for epoch in self.epochs)
        return words / seconds if seconds else None

    @property
    def seconds_per_epoch(self) -> Optional[float]:
        """Training time of a whole epoch at the mean speed, also where --max_steps cut one off."""
        words = self.start.get("steps_per_epoch", 0) * (
            self.config.get("batch_size", 0) * self.config.get("num_steps", 0)
        )
        speed = self.words_per_second
        return words / speed if words and speed else None

    def last(self, name: str) -> Optional[float]:
        """Return a field of the last epoch, or None."""
        return self.epochs[-1].get(name) if self.epochs else None


def read_run(directory: str) -> RunMetrics:
    """Read the config.json and metrics.jsonl of a run.

    A resumed run may have told of an epoch or a step twice: the later event counts. A last line
    that was cut off, by a kill or because it is just being written, is left out.

    Raises:
      UserError: The directory holds no run, or a file in it is damaged.
    """
    path = os.path.join(directory, "metrics.jsonl")
    corpus = read_record(directory)
    try:
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")[:-1]
        events = [json.loads(line) for line in lines]
        by_kind: dict[str, list] = {}
        for event in events:
            by_kind.setdefault(event["event"], []).append(event)
        epochs = {event["epoch"]: event for event in by_kind.get("epoch", [])}
        losses = {event["step"]: event["loss"] for event in by_kind.get("step", [])}
        tests = by_kind.get("test", [{}])
        return RunMetrics(
            directory=directory,
            config=dict(config),
            start=by_kind.get("start", [{}])[-1],
            epochs=[epochs[number] for number in sorted(epochs)],
            losses={step: loss for step, loss in sorted(losses.items()) if loss is not None},
            test_perplexity=tests[-1].get("test_perplexity"),
            corpus=corpus,
        )
    except OSError as error:
        raise UserError(f"{directory} is not a run: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} or config.json is damaged: {error!r}") from error


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
    """Runs on one corpus and vocabulary: those whose perplexities compare."""

    corpus: str  # how a report calls it
    groups: Sequence[Group]


def group_by_corpus(runs: Sequence[RunMetrics]) -> list[Section]:
    """Put runs on the same corpus together, in the order in which corpora first appear."""
    sections: dict[str, list[RunMetrics]] = {}
    for run in runs:
        # The checksum is also one of the vocabulary. Without one, the name is all that is known.
        key = run.corpus.checksum if run.corpus else _corpus_name(run)
        sections.setdefault(key, []).append(run)
    return [
        Section(_corpus_name(members[0]), group_by_config(members)) for members in sections.values()
    ]


def _corpus_name(run: RunMetrics) -> str:
    kind = "embedded" if run.config.get("corpus") == "embedded" else run.start.get("corpus", "?")
    parts = [kind]
    if "vocab_size" in run.start:
        parts.append(f"{run.start['vocab_size']:,} words")
    if run.corpus:
        parts += [run.corpus.data_path, f"checksum {run.corpus.checksum[:8]}"]
    return printable(", ".join(parts))


def group_by_config(runs: Sequence[RunMetrics]) -> list[Group]:
    """Put runs of the same config together, in the order in which configs first appear.

    Configs of the same name get the fields that tell them apart in their label.
    """
    groups: dict[str, list[RunMetrics]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
    labels = _labels([members[0].config for members in groups.values()])
    return [
        Group(label, sorted(members, key=lambda run: run.num_ranks))
        for label, members in zip(labels, groups.values())
    ]


def _labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    labels = []
    for config in configs:
        namesakes = [other for other in configs if other.get("name") == config.get("name")]
        names = sorted(set().union(*namesakes))
        different = [
            name for name in names if len({repr(other.get(name)) for other in namesakes}) > 1
        ]
        details = ", ".join(f"{name}={config.get(name)}" for name in different)
        name = str(config.get("name", "?"))
        labels.append(printable(f"{name} ({details})" if details else name))
    return labels


class Difference(NamedTuple):
    """How far the loss curves of two runs of a config are apart."""

    label: str
    runs: tuple[RunMetrics, RunMetrics]
    num_points: int  # of the curves, that both runs have
    absolute: float  # the largest |loss - loss|, in nats
    relative: float  # the largest |loss - loss| / loss
    step: int  # where that is


def loss_differences(groups: Sequence[Group]) -> list[Difference]:
    """Compare the loss curves of each two runs of the same config, where they share points."""
    differences = []
    for group in groups:
        for first, second in itertools.combinations(group.runs, 2):
            points, others = _points(first), _points(second)
            gaps = {
                span: abs(loss - others[span]) for span, loss in points.items() if span in others
            }
            if gaps:
                relative = {span: gap / max(points[span], 1e-9) for span, gap in gaps.items()}
                worst = max(relative, key=relative.__getitem__)
                differences.append(
                    Difference(
                        label=group.label,
                        runs=(first, second),
                        num_points=len(gaps),
                        absolute=max(gaps.values()),
                        relative=relative[worst],
                        step=worst[1],
                    )
                )
    return differences


def _points(run: RunMetrics) -> dict[tuple[int, int], float]:
    # A loss is a mean over the steps since the last event: those over other steps do not compare.
    return dict(zip(zip([0, *run.losses], run.losses), run.losses.values()))
