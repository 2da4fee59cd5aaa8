"""Learning curves of runs, drawn without a display."""

from __future__ import annotations

import io
import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which looks for a display
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from lm.errors import UserError
from lm.files import write_atomically
from lm.report.comparison import Section
from lm.report.metrics import RunMetrics
from lm.report.tables import run_title

logger = logging.getLogger("lm")

_STYLES = [style for style in ("-", "--", ":", "-.") for _ in range(10)]  # there are 10 colours


def draw_sections(sections: Sequence[Section], prefix: Optional[str]) -> list[Optional[bytes]]:
    """Draw the learning curves of each section, and write them as .png and .pdf.

    Args:
      sections: The runs, by corpus.
      prefix: Where the files go, without .png and .pdf; several sections add "-1", "-2", ...;
        empty or None for no files.

    Returns:
      For each section its PNG file; None where no run has finished an epoch.

    Raises:
      UserError: A file cannot be written.
    """
    pngs: list[Optional[bytes]] = []
    for number, section in enumerate(sections, start=1):
        runs = [(group, run) for group in section.groups for run in group.runs if run.epochs]
        if not runs:
            logger.info("no run has finished an epoch: no learning curves of %s", section.corpus)
            pngs.append(None)
            continue
        labels = [run_title(run, group.label) for group, run in runs]
        figure = draw_curves([run for _, run in runs], labels, title=section.corpus)
        pngs.append(drawn(figure, "png", dpi=150))
        if prefix:
            path = f"{prefix}-{number}" if len(sections) > 1 else prefix
            _write(path, pngs[-1], figure)
    return pngs


def _write(path: str, png: bytes, figure: Figure) -> None:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        for suffix, content in {"png": png, "pdf": drawn(figure, "pdf")}.items():
            write_atomically(os.path.realpath(f"{path}.{suffix}"), content)  # a link stays one
    except OSError as error:
        raise UserError(
            f"cannot write {path}.png and .pdf: {error.strerror}; choose another name with --curves"
        ) from error
    logger.info("wrote %s.png and %s.pdf", path, path)


def drawn(figure: Figure, form: str, **options: Any) -> bytes:
    """Return a figure as a file.

    Args:
      figure: Any.
      form: "png" or "pdf".
      **options: Of `Figure.savefig`.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, **options)
    return buffer.getvalue()


def draw_curves(runs: Sequence[RunMetrics], labels: Sequence[str], title: str) -> Figure:
    """Draw train and validation perplexity against epoch and against training time.

    Args:
      runs: Those with an epoch to show.
      labels: A name for each, for the legend; any text.
      title: Of the figure; any text.

    Returns:
      A figure of two by two panels, one line per run; perplexity is on a logarithmic axis.
    """
    legend_inches = 0.21 * -(-len(labels) // 2)
    figure = Figure(figsize=(10, 6.8 + legend_inches))
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for run, style in zip(runs, itertools.cycle(_STYLES)):
        numbers = [epoch["epoch"] for epoch in run.epochs]
        seconds = list(itertools.accumulate(epoch["epoch_seconds"] for epoch in run.epochs))
        for row, split in enumerate(["train", "valid"]):
            # None, of a run without evaluation or with an infinite value, leaves a gap.
            values = [epoch.get(f"{split}_perplexity") or float("nan") for epoch in run.epochs]
            for column, where in enumerate([numbers, seconds]):
                axes[row, column].plot(where, values, style, marker="o", markersize=3)
    for row, split in enumerate(["train", "validation"]):
        axes[row, 0].set_ylabel(f"{split} perplexity")
        for panel in axes[row]:
            panel.grid(True, alpha=0.25)
        # Without a number, of runs without evaluation, a logarithmic axis cannot be drawn.
        if np.isfinite(axes[row, 0].dataLim.intervaly).all():
            axes[row, 0].set_yscale("log")  # the other one shares it
            _label_log_axis(axes[row, 0])
    axes[1, 0].set_xlabel("epoch")
    axes[1, 0].xaxis.get_major_locator().set_params(integer=True)
    axes[1, 1].set_xlabel("training time, seconds")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    _add_legend(figure, axes[0, 0].lines, labels)
    figure.tight_layout(rect=(0, (0.2 + legend_inches) / figure.get_figheight(), 1, 1))
    return figure


def _add_legend(figure: Figure, lines: Sequence[Line2D], labels: Sequence[str]) -> None:
    # Matplotlib leaves out labels that begin with "_", and reads what is between two "$" as
    # mathematics: a name is set only where it no longer looks, and as plain text.
    legend = figure.legend(lines, ["name"] * len(lines), loc="lower center", ncols=2, frameon=False)
    for text, label in zip(legend.get_texts(), labels):
        text.set_text(label)
        text.set_parse_math(False)


def _label_log_axis(panel: Axes) -> None:
    # Powers of ten alone would label nothing from 80 to 90, and little from 80 to 900.
    low, high = panel.get_ylim()
    narrow = high < 4 * low
    panel.yaxis.set_major_locator(MaxNLocator(6) if narrow else LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_locator(NullLocator())
