"""Learning curves of runs as files for papers, drawn without a display."""

import io
import itertools
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure  # importing pyplot would look for a display
from matplotlib.ticker import LogLocator, NullLocator

from lm import logger
from lm.errors import printable
from lm.report.comparison import Section
from lm.report.metrics import RunMetrics
from lm.report.page import write_file
from lm.report.plots import line_style, numbers, time_unit
from lm.report.tables import run_title

_SPLITS = {"train": "train", "valid": "validation"}


def draw_sections(sections: Sequence[Section], prefix: str) -> None:
    """Draw the learning curves of each section, and write <prefix>.png and <prefix>.pdf.

    With several sections, "-1", "-2", ... are appended to the prefix.
    """
    for number, section in enumerate(sections, start=1):
        runs = [run for run in section.runs if run.epochs]
        if not runs:
            logger.info("no run has finished an epoch; no learning curves for %s", section.corpus)
            continue
        figure = draw_curves(runs, title=section.corpus)
        path = f"{prefix}-{number}" if len(sections) > 1 else prefix
        for form in ("png", "pdf"):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form, dpi=120)
            write_file(f"{path}.{form}", buffer.getvalue())


def draw_curves(runs: Sequence[RunMetrics], title: str) -> Figure:
    """Draw train and validation perplexity against epoch and training time."""
    unit, unit_seconds = time_unit(runs)
    legend_inches = 0.21 * len(runs)
    figure = Figure(figsize=(10, 6.8 + legend_inches))
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for index, run in enumerate(runs):
        color, dashes = line_style(index)
        style = {"color": color, "linestyle": dashes, "marker": ".xs^v"[index // 18 % 5]}
        epochs = numbers([epoch["epochs"] for epoch in run.epochs])
        seconds = itertools.accumulate(epoch["epoch_seconds"] for epoch in run.epochs)
        times = numbers(time / unit_seconds for time in seconds)
        for row, split in zip(axes, _SPLITS):
            values = _perplexities(run, split)
            row[0].plot(epochs, values, **style)
            row[1].plot(times, values, **style)
    for row, name in zip(axes, _SPLITS.values()):
        row[0].set_ylabel(f"{name} perplexity")
        for panel in row:
            panel.grid(True, alpha=0.25)
        # A logarithmic axis without numbers cannot be drawn.
        if np.isfinite(row[0].dataLim.intervaly).all():
            row[0].set_yscale("log")  # the panels of a row share the axis
            # The default labels are powers of ten. An axis from 80 to 90 would have no label.
            row[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            row[0].yaxis.set_minor_locator(NullLocator())
            row[0].yaxis.set_major_formatter("{x:g}")
    axes[1, 0].set_xlabel("epochs")
    # A run of less than two epochs needs fractions.
    is_long = any(run.num_epochs >= 2 for run in runs)
    axes[1, 0].xaxis.get_major_locator().set_params(integer=is_long)
    axes[1, 0].set_xlim(left=0)
    axes[1, 1].set_xlabel(f"training time, {unit}")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    # Matplotlib omits labels that start with "_", and reads text between two "$" as a formula.
    # Therefore the labels are set as plain text afterwards.
    lines = axes[0, 0].lines
    legend = figure.legend(lines, ["name"] * len(lines), loc="lower center", frameon=False)
    for text, run in zip(legend.get_texts(), runs):
        text.set_text(run_title(run, printable(str(run.record.config.get("name", "?")))))
        text.set_parse_math(False)
    figure.tight_layout(rect=(0, (0.2 + legend_inches) / figure.get_figheight(), 1, 1))
    return figure


def _perplexities(run: RunMetrics, split: str) -> list[float | None]:
    """Return a value per epoch. None leaves a gap: no validation, or a value out of range."""
    values = numbers([epoch.get(f"{split}_perplexity", math.nan) for epoch in run.epochs])
    return [value if value and value > 0 else None for value in values]
