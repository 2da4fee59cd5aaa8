"""The tables of a report: header and cells, for the console and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

from lm.cli.tables import printable
from lm.report.comparison import Group, RunMetrics, loss_differences


class Table(NamedTuple):
    """A table with its title, and a note on how to read it."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def build_tables(groups: Sequence[Group]) -> list[Table]:
    """Return the tables of a report; the last one only if two runs can be compared."""
    tables = [_results(groups), _runs(groups)]
    differences = _differences(groups)
    return [*tables, differences] if differences.rows else tables


def _results(groups: Sequence[Group]) -> Table:
    """One row a config, as the published table has it."""
    sizes = sorted({run.num_ranks for group in groups for run in group.runs}, reverse=True)
    rows = []
    for group in groups:
        best_known = group.runs[-1]
        times = [_number(group.seconds_per_epoch(size), ".1f") for size in sizes]
        rows.append([group.label, *_results_of(best_known), *times])
    times = [f"time/epoch, {num_ranks_text(size)}" for size in sizes]
    return Table(
        "Results",
        "Perplexities of the run with the most ranks; seconds per epoch of training.",
        ["config", "epochs", "train", "valid", "test", *times],
        rows,
    )


def _runs(groups: Sequence[Group]) -> Table:
    """One row a run, with what its ranks gained."""
    rows = []
    for group in groups:
        for run in group.runs:
            speed_up = group.speed_up(run)
            rows.append([
                run_name(run), group.label, str(run.num_ranks), *_results_of(run),
                _number(run.seconds_per_epoch, ".1f"), _number(run.words_per_second, ",.0f"),
                _number(speed_up, ".2f"),
                _number(speed_up and speed_up / run.num_ranks, ".0%"),
            ])  # fmt: skip
    return Table(
        "Runs",
        "Speed-up: time per epoch with 1 rank over that of the run, same config. Efficiency:"
        " speed-up over ranks.",
        ["run", "config", "ranks", "epochs", "train", "valid", "test", "time/epoch", "words/s",
         "speed-up", "efficiency"],
        rows,
    )  # fmt: skip


def _differences(groups: Sequence[Group]) -> Table:
    rows = [
        [
            f"{run_name(each.runs[0])} ({num_ranks_text(each.runs[0].num_ranks)})",
            f"{run_name(each.runs[1])} ({num_ranks_text(each.runs[1].num_ranks)})",
            str(each.num_points),
            f"{each.absolute:.2e}",
            f"{each.relative:.2e}",
            str(each.step),
        ]
        for each in loss_differences(groups)
    ]
    return Table(
        "Largest difference of the loss curves",
        "Between runs of the same config, over the step events that both have; nats a token.",
        ["run", "other run", "points", "largest", "relative", "at step"],
        rows,
    )


def run_name(run: RunMetrics) -> str:
    """Return how a report calls a run: by its directory, as it was given, on one line."""
    return printable(run.directory.rstrip("/"))


def _results_of(run: RunMetrics) -> list[str]:
    return [
        str(len(run.epochs)),
        _number(run.last("train_perplexity"), ".2f"),
        _number(run.last("valid_perplexity"), ".2f"),
        _number(run.test_perplexity, ".2f"),
    ]


def num_ranks_text(count: int) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{count} rank{'s' * (count > 1)}"


def _number(value: Optional[float], form: str) -> str:
    return "-" if value is None else format(value, form)
