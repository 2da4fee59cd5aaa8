"""Learning curves of runs, drawn without a display."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which looks for a display
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from lm.report.comparison import RunMetrics


def draw_curves(runs: Sequence[RunMetrics], labels: Sequence[str], title: str) -> Figure:
    """Draw train and validation perplexity against epoch and against training time.

    Args:
      runs: Those with an epoch to show.
      labels: A name for each, for the legend; any text.
      title: Of the figure; any text.

    Returns:
      A figure of two by two panels, one line a run; perplexity is on a logarithmic axis.
    """
    figure = Figure(figsize=(10, 7))
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for run in runs:
        numbers = [epoch["epoch"] for epoch in run.epochs]
        seconds = list(itertools.accumulate(epoch["epoch_seconds"] for epoch in run.epochs))
        for row, split in enumerate(["train", "valid"]):
            # None, of a run without evaluation or with an infinite value, leaves a gap.
            values = [epoch.get(f"{split}_perplexity") or float("nan") for epoch in run.epochs]
            for column, where in enumerate([numbers, seconds]):
                axes[row, column].plot(where, values, marker="o", markersize=3)
    for row, split in enumerate(["train", "validation"]):
        axes[row, 0].set_ylabel(f"{split} perplexity")
        for panel in axes[row]:
            panel.set_yscale("log")
            panel.grid(True, alpha=0.25)
        _label_log_axis(axes[row, 0])  # the other one shares it
    axes[1, 0].set_xlabel("epoch")
    axes[1, 0].xaxis.get_major_locator().set_params(integer=True)
    axes[1, 1].set_xlabel("training time, seconds")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    _add_legend(figure, axes[0, 0].lines, labels)
    figure.tight_layout(rect=(0, 0.03 + 0.03 * -(-len(labels) // 2), 1, 1))
    return figure


def _add_legend(figure: Figure, lines: Sequence[Line2D], labels: Sequence[str]) -> None:
    # Matplotlib leaves out labels that begin with "_", and reads what is between two "$" as
    # mathematics: a name is set only where it no longer looks, and as plain text.
    legend = figure.legend(lines, ["name"] * len(lines), loc="lower center", ncols=2, frameon=False)
    for text, label in zip(legend.get_texts(), labels):
        text.set_text(label)
        text.set_parse_math(False)


def _label_log_axis(panel: Axes) -> None:
    """Powers of ten alone would label nothing between 80 and 90, and little between 80 and 900."""
    low, high = panel.get_ylim()
    narrow = high < 4 * low
    panel.yaxis.set_major_locator(MaxNLocator(6) if narrow else LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_locator(NullLocator())


def save_curves(figure: Figure, prefix: str) -> list[str]:
    """Write PREFIX.png and PREFIX.pdf; returns their paths.

    Raises:
      OSError: A file cannot be written.
    """
    paths = [f"{prefix}.png", f"{prefix}.pdf"]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def png_bytes(figure: Figure) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
