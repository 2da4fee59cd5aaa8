"""The tables of a report: headers and cells, for the console and for the page."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lm.cli.markdown import epochs_text, markdown_table
from lm.events.read import Event
from lm.report.comparison import (
    Group,
    RunMetrics,
    Section,
    comparable_pairs,
    compare,
    num_ranks_text,
    runs_by_text,
)

_RESULTS_NOTE = (
    "Perplexities after the last epoch or its trained part, or after the best epoch with --test_on"
    " best; seconds per full epoch of training, from the speed on the last number of ranks."
)


class Table(NamedTuple):
    """A table with a title and a note that explains it."""

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
    lines = [
        f"{run_title(first)} and {run_title(second)}: {compare(first, second)}\n"
        for first, second in comparable_pairs(section.groups)
    ]
    return "\n".join([f"Corpus: {section.corpus}\n", *tables, *lines])


def build_tables(groups: Sequence[Group]) -> list[Table]:
    """Return the tables of a section. For a single run, tables that compare runs are left out."""
    runs, outcomes = _runs(groups), _outcomes(groups)
    return [runs, outcomes] if len(runs.rows) == 1 else [_results(groups), runs, outcomes]


def build_tokenizer_tables(sections: Sequence[Section]) -> list[Table]:
    """Return a table for each text that the runs divide into tokens in different ways."""
    return [_tokenizers(runs) for runs in runs_by_text(sections)]


def _tokenizers(runs: Sequence[RunMetrics]) -> Table:
    rows = []
    for run in sorted(runs, key=_rank):
        size, valid = run.start.get("vocab_size"), run.tested_epoch
        rows.append([
            run.name, str(run.start.get("tokenizer", "-")), _number(size, ",d"),
            epochs_text(run.num_epochs), _comparable(valid, "valid", "bits_per_byte", ".4f"),
            _comparable(run.test, "test", "bits_per_byte", ".4f"),
            _comparable(valid, "valid", "word_perplexity", ".2f"),
        ])  # fmt: skip
    return Table(
        "Tokenizers",
        "Runs on the same text with different tokenizers, in the order of their bits per byte on"
        " validation. Their perplexities are not comparable. *: not comparable, because unknown"
        " words became <unk>.",
        [
            "run", "tokenizer", "vocabulary", "epochs", "valid bits/byte", "test bits/byte",
            "valid word perplexity",
        ],
        rows,
    )  # fmt: skip


def _rank(run: RunMetrics) -> tuple[bool, float]:
    valid = run.tested_epoch
    return bool(valid.get("valid_unknown")), valid.get("valid_bits_per_byte", math.inf)


def _comparable(event: Event, split: str, metric: str, form: str) -> str:
    mark = "*" if event.get(f"{split}_unknown") else ""
    return _number(event.get(f"{split}_{metric}"), form) + mark


def _outcomes(groups: Sequence[Group]) -> Table:
    return Table(
        "Outcomes",
        "Steps: trained and planned by num_epochs. Exact: whether the results are bitwise identical"
        " on any supported number of ranks.",
        ["run", "outcome", "steps", "starts", "exact"],
        [
            [run.name, run.outcome, run.steps_text, str(len(run.starts)), run.exact]
            for group in groups for run in group.runs
        ],
    )  # fmt: skip


def _results(groups: Sequence[Group]) -> Table:
    """Return a table with one row per config, in the format of published tables."""
    sizes = sorted({run.num_ranks for group in groups for run in group.runs}, reverse=True)
    rows = []
    for group in groups:
        times = [_number(group.seconds_per_epoch(size), ".1f") for size in sizes]
        longest = max(group.runs, key=lambda run: (run.step, bool(run.test), run.num_ranks))
        rows.append([group.label, *_perplexities(longest), *times])
    times = [f"time/epoch, {num_ranks_text(size)}" for size in sizes]
    return Table(
        "Results",
        f"The run of each config that trained longest. {_RESULTS_NOTE}",
        ["config", "epochs", "train", "valid", "test", *times],
        rows,
    )


def _runs(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        for run in group.runs:
            speedup = group.speedup(run)
            efficiency = speedup and speedup / run.num_ranks
            rows.append([
                run.name, group.label, run.ranks_text, *_perplexities(run),
                _number(run.seconds_per_epoch, ".1f"), _number(run.tokens_per_second, ",.0f"),
                _number(speedup, ".2f"), _number(efficiency, ".0%"),
            ])  # fmt: skip
    header = [
        "run", "config", "ranks", "epochs", "train", "valid", "test", "time/epoch", "tokens/s",
        "speedup", "efficiency",
    ]  # fmt: skip
    if len(rows) == 1:
        return Table("Results", _RESULTS_NOTE, header[:-2], [rows[0][:-2]])
    return Table(
        "Runs",
        "Speedup: the time per epoch on 1 rank divided by the time of the run, for the same config."
        " Efficiency: speedup divided by the number of ranks.",
        header,
        rows,
    )


def run_title(run: RunMetrics, *details: str) -> str:
    """Return the name of a run, followed by details and the number of ranks."""
    return f"{run.name} ({', '.join([*details, run.ranks_text])})"


def _perplexities(run: RunMetrics) -> list[str]:
    perplexities = (
        run.tested_epoch.get("train_perplexity"),
        run.tested_epoch.get("valid_perplexity"),
        run.test.get("test_perplexity"),
    )
    return [epochs_text(run.num_epochs), *(_number(value, ".2f") for value in perplexities)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
