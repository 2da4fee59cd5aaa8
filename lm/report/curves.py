"""Learning curves of runs, drawn without a display."""

import io
import itertools
import json
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure  # importing pyplot would look for a display
from matplotlib.ticker import LogLocator, NullLocator

from lm import logger
from lm.report.comparison import Group, RunMetrics, Section
from lm.report.page import write_file
from lm.report.tables import run_title

_SPLITS = "train", "valid"
_MARKERS = "os^x"  # the marker changes after the ten colors of Matplotlib
_DASHES = {"solid": "-", "dashed": "--", "dotted": ":", "dash-dot": "-."}


def draw_sections(sections: Sequence[Section], prefix: str) -> list[bytes | None]:
    """Draw the learning curves of each section, and write <prefix>.png and <prefix>.pdf.

    With several sections, "-1", "-2", ... are appended to the prefix. Return the PNG of each
    section, or None if no run of the section has finished an epoch.
    """
    pngs: list[bytes | None] = []
    for number, section in enumerate(sections, start=1):
        curves = [curve for group in section.groups for curve in curves_of(group)]
        if not curves:
            logger.info("no run has finished an epoch; no learning curves for %s", section.corpus)
            pngs.append(None)
            continue
        figure = draw_curves(curves, title=section.corpus)
        path = f"{prefix}-{number}" if len(sections) > 1 else prefix
        pngs.append(rendered(figure, "png"))
        write_file(f"{path}.png", pngs[-1])
        write_file(f"{path}.pdf", rendered(figure, "pdf"))
    return pngs


def curves_of(group: Group) -> list[Group]:
    """Divide the runs that have finished an epoch into curves: runs with the same perplexities."""
    identical: dict[str, list[RunMetrics]] = {}
    for run in group.runs:
        if run.epochs:
            identical.setdefault(json.dumps([_perplexities(run, s) for s in _SPLITS]), []).append(
                run
            )
    return [Group(_label(group, runs), runs) for runs in identical.values()]


def _label(group: Group, runs: Sequence[RunMetrics]) -> str:
    if len(runs) == 1:
        return run_title(runs[0], group.label)
    names = [f"{run_title(run)} {dashes}" for run, dashes in zip(runs, itertools.cycle(_DASHES))]
    return f"{group.label}, identical: {', '.join(names)}"


def rendered(figure: Figure, form: str) -> bytes:
    """Return a figure as a file in the format "png" or "pdf"."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=120)
    return buffer.getvalue()


def draw_curves(curves: Sequence[Group], title: str) -> Figure:
    """Draw train and validation perplexity against epoch and training time.

    The runs of a curve have the same perplexities, at least of one epoch, and share a line by
    epoch. By time, they have a line each, which differ in their dashes.
    """
    legend_inches = 0.21 * len(curves)
    figure = Figure(figsize=(10, 6.8 + legend_inches))
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for index, curve in enumerate(curves):
        style = dict(color=f"C{index % 10}", marker=_MARKERS[index // 10 % 4], markersize=3)
        for row, split in enumerate(_SPLITS):
            for run, dashes in zip(curve.runs, itertools.cycle(_DASHES.values())):
                epochs, values = run.epochs, _perplexities(run, split)
                seconds = list(itertools.accumulate(epoch["epoch_seconds"] for epoch in epochs))
                axes[row, 1].plot(seconds, values, dashes, **style)
            numbers = [epoch["epochs"] for epoch in epochs]
            axes[row, 0].plot(numbers, values, "-", **style)
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
    axes[1, 0].set_xlabel("epochs")
    # A run of less than two epochs needs fractions.
    is_long = any(run.num_epochs >= 2 for curve in curves for run in curve.runs)
    axes[1, 0].xaxis.get_major_locator().set_params(integer=is_long)
    axes[1, 0].set_xlim(left=0)
    axes[1, 1].set_xlabel("training time, seconds")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    # Matplotlib omits labels that start with "_", and reads text between two "$" as a formula.
    # Therefore the labels are set as plain text afterwards.
    lines = axes[0, 0].lines
    legend = figure.legend(lines, ["name"] * len(lines), loc="lower center", frameon=False)
    for text, curve in zip(legend.get_texts(), curves):
        text.set_text(curve.label)
        text.set_parse_math(False)
    figure.tight_layout(rect=(0, (0.2 + legend_inches) / figure.get_figheight(), 1, 1))
    return figure


def _perplexities(run: RunMetrics, split: str) -> list[float]:
    """Return a value per epoch. NaN leaves a gap: no validation, or an infinite perplexity."""
    return [epoch.get(f"{split}_perplexity") or float("nan") for epoch in run.epochs]
