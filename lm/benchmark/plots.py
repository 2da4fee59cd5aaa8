"""Plots of the results, as PNG and PDF."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure  # not pyplot, which looks for a display
from matplotlib.ticker import FormatStrFormatter

from lm.benchmark.statistics import Summary

logger = logging.getLogger("lm")


@contextlib.contextmanager
def plot(stem: str, title: str, num_axes: int = 1) -> Iterator[list]:
    """Give axes to draw on, then save the figure.

    Args:
      stem: The path of `stem.png` and `stem.pdf`.
      title: Above the axes.
      num_axes: Axes side by side.

    Yields:
      The axes.
    """
    figure = Figure(figsize=(5 * num_axes, 3.6))
    grid = figure.subplots(1, num_axes, squeeze=False)
    yield list(grid[0])
    for axes in grid[0]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    for suffix in ("png", "pdf"):
        figure.savefig(f"{stem}.{suffix}", dpi=150)
    logger.info("wrote %s.png and .pdf", stem)


def bars(axes, values: Mapping[str, Summary], label: str) -> None:
    """Draw horizontal bars, the first on top, each with its standard deviation."""
    means, stds = ([getattr(each, part) for each in values.values()] for part in ("mean", "std"))
    axes.barh(range(len(values)), means, xerr=stds, color="tab:blue", height=0.6, capsize=3)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.set_xlabel(label)


def lines(axes, ranks: list[int], series: Mapping[str, list], x_label: str) -> None:
    """Draw speed-ups over the numbers of ranks, a line for each series, in logarithmic scales."""
    for name, values in series.items():
        axes.plot(ranks, values, ":" if name == "ideal" else "o-", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_xlabel(x_label)
    axes.set_ylabel("speed-up over one rank")
