"""The tables of results: headers and cells, for the console and for the page."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from lm.cli.markdown import epochs_text, markdown_table, perplexity_form
from lm.errors import printable
from lm.events.read import Event
from lm.report.comparison import Group, Section, group_by_config, runs_by_text
from lm.report.metrics import RunMetrics, num_ranks_text

_RUNS_NOTE = (
    "Valid and test: the perplexities after the last epoch or its trained part, or after the best"
    " epoch with --test_on best. Train: the mean during this epoch, with dropout, while the weights"
    " change and before they are averaged. Time/epoch: seconds per full epoch of training, from the"
    " speed on the last number of ranks."
)
_SPEEDUP_NOTE = (
    "Speedup: the time per epoch on 1 rank divided by the time of the run, for the same config."
    " Efficiency: speedup divided by the number of ranks."
)
# The usual metrics of models of characters and of bytes.
_BITS = {"characters": "bits_per_character", "bytes": "bits_per_byte"}
_MAX_SHOWN = 1e15  # Larger numbers are shown as powers of ten.


class Table(NamedTuple):
    """A table with a title and a note that explains it."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def text(self) -> str:
        """The table for the console, in Markdown."""
        note = f"\n{self.note}\n" if self.note else ""
        return f"{printable(self.title)}\n\n{markdown_table(self.header, self.rows)}\n{note}"


def headline(section: Section) -> str:
    """Return a sentence about the run with the best validation perplexity."""
    run = min(section.runs, key=lambda run: run.valid_perplexity)
    valid = run.tested_epoch
    if "valid_perplexity" not in valid:
        steps = f"{run.name} has trained {run.steps_text} steps."
        return f"No run has validated a whole epoch yet. {steps}"
    text = f"{run.name} reaches a validation perplexity of {_digits(valid['valid_perplexity'])}"
    if "valid_bits_per_byte" in valid:
        text += f" ({_comparable(valid, 'valid', 'bits_per_byte', '.4f')} bits per byte)"
    if "test_perplexity" in run.test:
        text += f" and a test perplexity of {_digits(run.test['test_perplexity'])}"
    epochs, seconds = run.num_epochs, sum(epoch["epoch_seconds"] for epoch in run.epochs)
    if run.tests_best:
        epochs *= valid["step"] / run.epochs[-1]["step"]
        seconds = run.seconds_at(valid["step"])
    interval = tqdm.format_interval(min(seconds, _MAX_SHOWN))
    text += f" after {epochs_text(epochs)} epochs, in {interval}"
    text += f" on {run.ranks_text}."
    if run.exact == "yes":
        text += " Its results are bitwise identical on any supported number of ranks."
    return text


def build_tables(groups: Sequence[Group]) -> list[Table]:
    """Return the tables of a section. If each config has one run, a table of configs is useless."""
    results = [_results(groups)] if any(len(group.runs) > 1 for group in groups) else []
    seeds = _seeds(groups)
    return [*results, *([seeds] if seeds.rows else []), _runs(groups), _outcomes(groups)]


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
        "Steps: trained and planned. Exact: whether the results are bitwise identical on any"
        " supported number of ranks.",
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
        "The run of each config that trained longest. The times are means of the runs.",
        ["config", "epochs", "train", "valid", "test", *times],
        rows,
    )


def _seeds(groups: Sequence[Group]) -> Table:
    """Return a table of the configs that several runs with different seeds trained to the end."""
    rows = []
    runs = [run for group in groups for run in group.runs]
    metric = _bits_metric(runs)
    for group in group_by_config(runs, ignored=["seed", "name"]):
        longest = max(run.step for run in group.runs)
        ended = [run for run in group.runs if run.step == longest or run.ended_early]
        for label, tests_best in ((group.label, False), (f"{group.label}, best weights", True)):
            same = [run for run in ended if run.tests_best == tests_best]
            seeds = {run.record.config["seed"]: run for run in same}
            if len(seeds) < 2:
                continue
            values = ([*final_perplexities(r), *_final_bits(r, metric)] for r in seeds.values())
            epochs = sorted(run.num_epochs for run in seeds.values())
            ends = dict.fromkeys(map(epochs_text, (epochs[0], epochs[-1])))
            rows.append([label, str(len(seeds)), " to ".join(ends), *map(_mean_text, zip(*values))])
    note = (
        "Mean ± standard deviation over seeds. Only the runs with the most steps, and the runs that"
        " --early_stopping_epochs ended, are counted."
    )
    header = ["config", "seeds", "epochs", "train", "valid", "test", *_bits_header(metric)]
    return Table("Seeds", note, header, rows)


def _mean_text(values: Sequence[float | None]) -> str:
    if None in values:
        return "-"
    with np.errstate(all="ignore"):  # a damaged file may contain any number
        mean, deviation = np.mean(values), np.std(values, ddof=1)
    form = perplexity_form(mean)
    return f"{_number(mean, form)} ± {_number(deviation, form)}"


def build_time_table(section: Section, perplexities: Sequence[float]) -> Table:
    """Return the training time that each run needed to reach validation perplexities."""
    rows = []
    for run in section.runs:
        seconds = [*(run.seconds_to(perplexity) for perplexity in perplexities), run.clock()[1][-1]]
        times = ["-" if each is None else tqdm.format_interval(each) for each in seconds]
        rows.append([run.name, run.ranks_text, *times])
    return Table(
        "Time to quality",
        "Training time until a validation perplexity was at most the given value, and to the end.",
        ["run", "ranks", *map(str, perplexities), "end"],
        rows,
    )


def _runs(groups: Sequence[Group]) -> Table:
    rows = []
    metric = _bits_metric([run for group in groups for run in group.runs])
    for group in groups:
        for run in group.runs:
            speedup = group.speedup(run)
            efficiency = speedup and speedup / run.num_ranks
            rows.append([
                run.name, group.label, run.ranks_text, *_perplexities(run),
                *map(_digits, _final_bits(run, metric)),
                _number(run.seconds_per_epoch, ".1f"), _number(run.tokens_per_second, ",.0f"),
                _number(speedup, ".2f"), _number(efficiency, ".0%"),
            ])  # fmt: skip
    header = [
        "run", "config", "ranks", "epochs", "train", "valid", "test", *_bits_header(metric),
        "time/epoch", "tokens/s", "speedup", "efficiency",
    ]  # fmt: skip
    note = _RUNS_NOTE
    if metric == _BITS["characters"]:
        note += " Bits per character are too low if unknown characters became <unk>."
    if len({run.num_ranks for group in groups for run in group.runs}) > 1:
        return Table("Runs", f"{note} {_SPEEDUP_NOTE}", header, rows)
    return Table("Runs", note, header[:-2], [row[:-2] for row in rows])


def run_title(run: RunMetrics, *details: str) -> str:
    """Return the name of a run, followed by details and the number of ranks."""
    return f"{run.name} ({', '.join([*details, run.ranks_text])})"


def _perplexities(run: RunMetrics) -> list[str]:
    return [epochs_text(run.num_epochs), *map(_digits, final_perplexities(run))]


def final_perplexities(run: RunMetrics) -> list[float | None]:
    """Return the perplexities on train, valid and test."""
    epoch = run.tested_epoch
    return [epoch.get("train_perplexity"), epoch.get("valid_perplexity"),
            run.test.get("test_perplexity")]  # fmt: skip


def _bits_metric(runs: Sequence[RunMetrics]) -> str | None:
    """Return the usual metric of the runs of a section if they predict characters or bytes."""
    metrics = (_BITS.get(str(run.start.get("tokenizer"))) for run in runs)
    return next(filter(None, metrics), None)


def _bits_header(metric: str | None) -> list[str]:
    unit = (metric or "").removeprefix("bits_per_")
    return [f"{split} bits/{unit}" for split in ("valid", "test") if metric]


def _final_bits(run: RunMetrics, metric: str | None) -> list[float | None]:
    """Return the metric on valid and test, or nothing without a metric."""
    events = {"valid": run.tested_epoch, "test": run.test}
    return [event.get(f"{split}_{metric}") for split, event in events.items() if metric]


def _digits(value: float | None) -> str:
    return "-" if value is None else _number(value, perplexity_form(value))


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form if abs(value) < _MAX_SHOWN else ".3g")
