"""Plots of the results, as PNG and PDF; without matplotlib there are none, and the log says so."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Optional

_logger = logging.getLogger("lm")


@contextlib.contextmanager
def plot(directory: str, stem: str, title: str, num_axes: int = 1) -> Iterator[Optional[list]]:
    """Give axes to draw on, then save the figure.

    Args:
      directory: Where `stem.png` and `stem.pdf` go.
      stem: The files' name without suffix.
      title: Above the axes.
      num_axes: Axes side by side.

    Yields:
      The axes; None where matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        _logger.warning("no plot of %s: matplotlib is missing (pip install -e '.[bench]')", stem)
        yield None
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, num_axes, figsize=(5 * num_axes, 3.6), squeeze=False)
    axes = list(grid[0])
    yield axes
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
        if each.get_legend_handles_labels()[0]:
            each.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    for suffix in ("png", "pdf"):
        figure.savefig(os.path.join(directory, f"{stem}.{suffix}"), dpi=150)
    pyplot.close(figure)
    _logger.info("wrote %s and .pdf", os.path.join(directory, f"{stem}.png"))


def bars(axes, names: Sequence[str], means: Sequence[float], stds: Sequence[float], label: str):
    """Draw horizontal bars, the first on top, each with its standard deviation."""
    axes.barh(range(len(names)), means, xerr=stds, color="tab:blue", height=0.6, capsize=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
