"""Learning curves of runs, drawn without a display."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

import matplotlib

from lm.comparison import RunMetrics

matplotlib.use("Agg")  # hosts of clusters have no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator


def draw_curves(runs: Sequence[RunMetrics], labels: Sequence[str]) -> Figure:
    """Draw train and validation perplexity against epoch and against training time.

    Args:
      runs: Those with an epoch to show.
      labels: A name for each, for the legend.

    Returns:
      A figure of two by two panels, one line a run; perplexity is on a logarithmic axis.
    """
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex="col", sharey="row")
    for run, label in zip(runs, labels):
        numbers = [epoch["epoch"] for epoch in run.epochs]
        seconds = list(itertools.accumulate(epoch["epoch_seconds"] for epoch in run.epochs))
        for row, split in enumerate(["train", "valid"]):
            # None, of a run without evaluation or with an infinite value, leaves a gap.
            values = [epoch.get(f"{split}_perplexity") or float("nan") for epoch in run.epochs]
            for column, where in enumerate([numbers, seconds]):
                axes[row, column].plot(where, values, marker="o", markersize=3, label=label)
    for row, split in enumerate(["train", "validation"]):
        axes[row, 0].set_ylabel(f"{split} perplexity")
        for panel in axes[row]:
            panel.set_yscale("log")
            panel.grid(True, alpha=0.25)
        _label_log_axis(axes[row, 0])  # the other one shares it
    axes[1, 0].set_xlabel("epoch")
    axes[1, 0].xaxis.get_major_locator().set_params(integer=True)
    axes[1, 1].set_xlabel("training time, seconds")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.03 + 0.03 * -(-len(names) // 2), 1, 1))
    return figure


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
