"""Learning curves of runs, drawn without a display."""

import io
import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure  # importing pyplot would look for a display
from matplotlib.ticker import LogLocator, NullLocator

from lm import logger
from lm.report.comparison import RunMetrics, Section
from lm.report.page import write_file
from lm.report.tables import run_title

# The style changes after the ten colors of Matplotlib.
_STYLES = [style for style in ("-", "--", ":", "-.") for _ in range(10)]


def draw_sections(sections: Sequence[Section], prefix: str) -> list[bytes | None]:
    """Draw the learning curves of each section, and write <prefix>.png and <prefix>.pdf.

    With several sections, "-1", "-2", ... are appended to the prefix. Return the PNG of each
    section, or None if no run of the section has finished an epoch.
    """
    pngs: list[bytes | None] = []
    for number, section in enumerate(sections, start=1):
        runs = [(group, run) for group in section.groups for run in group.runs if run.epochs]
        if not runs:
            logger.info("no run has finished an epoch; no learning curves for %s", section.corpus)
            pngs.append(None)
            continue
        labels = [run_title(run, group.label) for group, run in runs]
        figure = draw_curves([run for _, run in runs], labels, title=section.corpus)
        path = f"{prefix}-{number}" if len(sections) > 1 else prefix
        pngs.append(rendered(figure, "png"))
        write_file(f"{path}.png", pngs[-1])
        write_file(f"{path}.pdf", rendered(figure, "pdf"))
    return pngs


def rendered(figure: Figure, form: str) -> bytes:
    """Return a figure as a file in the format "png" or "pdf"."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=120)
    return buffer.getvalue()


def draw_curves(runs: Sequence[RunMetrics], labels: Sequence[str], title: str) -> Figure:
    """Draw train and validation perplexity of labeled runs against epoch and training time.

    Each run has at least one epoch.
    """
    legend_inches = 0.21 * -(-len(labels) // 2)
    figure = Figure(figsize=(10, 6.8 + legend_inches))
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for run, style in zip(runs, itertools.cycle(_STYLES)):
        numbers = [epoch["epoch"] for epoch in run.epochs]
        seconds = list(itertools.accumulate(epoch["epoch_seconds"] for epoch in run.epochs))
        for row, split in enumerate(["train", "valid"]):
            # NaN leaves a gap, for runs without validation and infinite perplexities.
            values = [epoch.get(f"{split}_perplexity") or float("nan") for epoch in run.epochs]
            for column, where in enumerate([numbers, seconds]):
                axes[row, column].plot(where, values, style, marker="o", markersize=3)
    for row, split in enumerate(["train", "validation"]):
        axes[row, 0].set_ylabel(f"{split} perplexity")
        for panel in axes[row]:
            panel.grid(True, alpha=0.25)
        # A logarithmic axis without numbers cannot be drawn.
        if np.isfinite(axes[row, 0].dataLim.intervaly).all():
            axes[row, 0].set_yscale("log")  # the panels of a row share the axis
            # The default labels are powers of ten. An axis from 80 to 90 would have no label.
            axes[row, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes[row, 0].yaxis.set_minor_locator(NullLocator())
            axes[row, 0].yaxis.set_major_formatter("{x:g}")
    axes[1, 0].set_xlabel("epoch")
    axes[1, 0].xaxis.get_major_locator().set_params(integer=True)
    axes[1, 1].set_xlabel("training time, seconds")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    # Matplotlib omits labels that start with "_", and reads text between two "$" as a formula.
    # Therefore the labels are set as plain text afterwards.
    lines = axes[0, 0].lines
    legend = figure.legend(lines, ["name"] * len(lines), loc="lower center", ncols=2, frameon=False)
    for text, label in zip(legend.get_texts(), labels):
        text.set_text(label)
        text.set_parse_math(False)
    figure.tight_layout(rect=(0, (0.2 + legend_inches) / figure.get_figheight(), 1, 1))
    return figure
