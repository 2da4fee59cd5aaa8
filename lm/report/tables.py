"""The tables of a report: header and cells, for the console and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

from lm.cli.tables import markdown_table
from lm.report.comparison import Group, Section, exact_comparison, loss_difference, pairs_of
from lm.report.metrics import RunMetrics


class Table(NamedTuple):
    """A table with its title, and a note on how to read it."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def text(self) -> str:
        """The table for the console, in Markdown."""
        return f"{self.title}\n\n{markdown_table(self.header, self.rows)}\n\n{self.note}\n"


def section_text(section: Section) -> str:
    """Return the report of a section for the console."""
    tables = [table.text for table in build_tables(section.groups)]
    lines = [f"{line}\n" for line in exact_lines(section.groups)]
    return "\n".join([f"Corpus: {section.corpus}\n", *tables, *lines])


def exact_lines(groups: Sequence[Group]) -> list[str]:
    """Say of each two runs that do the same steps, in a line, whether their numbers are equal."""
    return [
        f"{run_title(first)} and {run_title(second)}: {exact_comparison(first, second)}"
        for first, second in pairs_of(groups)
    ]


def build_tables(groups: Sequence[Group]) -> list[Table]:
    """Return the tables of a report; the last one only if two runs can be compared."""
    tables = [_results(groups), _runs(groups)]
    differences = _differences(groups)
    return [*tables, differences] if differences.rows else tables


def _results(groups: Sequence[Group]) -> Table:
    """One row per config, as the published table has it."""
    sizes = sorted({run.num_ranks for group in groups for run in group.runs}, reverse=True)
    rows = []
    for group in groups:
        most_ranks = group.runs[-1]
        times = [_number(group.seconds_per_epoch(size), ".1f") for size in sizes]
        rows.append([group.label, *_results_of(most_ranks), *times])
    times = [f"time/epoch, {num_ranks_text(size)}" for size in sizes]
    return Table(
        "Results",
        "Perplexities of the run with the most ranks after its last epoch, or after its best one"
        " with --test_on best; seconds per epoch of training.",
        ["config", "epochs", "train", "valid", "test", *times],
        rows,
    )


def _runs(groups: Sequence[Group]) -> Table:
    """One row per run, with what its ranks gained."""
    rows = []
    for group in groups:
        for run in group.runs:
            speed_up = group.speed_up(run)
            rows.append([
                run.name, group.label, ", then ".join(map(str, run.ranks_in_turn)),
                *_results_of(run),
                _number(run.seconds_per_epoch, ".1f"), _number(run.words_per_second, ",.0f"),
                _number(speed_up, ".2f"),
                _number(speed_up and speed_up / run.num_ranks, ".0%"),
            ])  # fmt: skip
    return Table(
        "Runs",
        "Speed-up: the time per epoch with 1 rank divided by that of the run, same config."
        " Efficiency: speed-up divided by the number of ranks. A run that was resumed on other"
        " ranks is timed by its epochs on the last.",
        ["run", "config", "ranks", "epochs", "train", "valid", "test", "time/epoch", "words/s",
         "speed-up", "efficiency"],
        rows,
    )  # fmt: skip


def _differences(groups: Sequence[Group]) -> Table:
    rows = []
    for first, second in pairs_of(groups):
        found = loss_difference(first, second)
        if found:
            rows.append([
                run_title(first), run_title(second), str(found.num_points),
                f"{found.absolute:.2e}", f"{found.relative:.2e}", str(found.step),
            ])  # fmt: skip
    return Table(
        "Largest difference between the loss curves",
        "Between runs that do the same steps, over the step events that both have; nats per token.",
        ["run", "other run", "points", "largest", "relative", "at step"],
        rows,
    )


def run_title(run: RunMetrics, *details: str) -> str:
    """Return the name of a run with its number of ranks, and with details before that."""
    ranks = ", then ".join(map(num_ranks_text, run.ranks_in_turn))
    return f"{run.name} ({', '.join([*details, ranks])})"


def _results_of(run: RunMetrics) -> list[str]:
    perplexities = (
        run.tested_epoch.get("train_perplexity"),
        run.tested_epoch.get("valid_perplexity"),
        run.last("test", "test_perplexity"),
    )
    return [str(len(run.epochs)), *(_number(value, ".2f") for value in perplexities)]


def num_ranks_text(count: int) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{count} rank{'s' * (count > 1)}"


def _number(value: Optional[float], form: str) -> str:
    return "-" if value is None else format(value, form)
