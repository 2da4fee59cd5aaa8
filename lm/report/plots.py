"""Plots of runs by step, for plotly.js: each plot has traces and a layout, as its JSON schema."""

import html
import itertools
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lm.record import CHECKPOINTS_DIR
from lm.report.comparison import Section
from lm.report.metrics import RunMetrics

Plot = dict[str, Any]

# Okabe and Ito's colors, which color-blind readers can tell apart. The blue is lighter, so that it
# is visible on a dark page.
COLORS = "#1f87d2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
_DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted"}  # names in plotly.js and CSS
_FIELDS = {
    "learning_rate": "Learning rate",
    "gradient_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "exchange_share": "Share of the gradient exchange",
}
_MAX_POINTS = 30_000  # of each field, in all runs together
_MAX_POINTS_PER_LINE = 3_000
_SMALL_SHARE = 0.001  # A single rank exchanges nothing.
_MAX_VALUE = 1e100
_UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}


def build_plots(section: Section) -> list[Plot]:
    """Return the plots of a section: the loss, and the other fields of step events."""
    runs = runs_of(section)
    limit = min(max(_MAX_POINTS // len(runs), 100), _MAX_POINTS_PER_LINE)
    longest = max(run.clock()[1][-1] for run in runs)
    unit = next((name for name, each in _UNITS.items() if longest > 2 * each), "seconds")
    curves = [_Curves(index, run, _UNITS[unit], limit) for index, run in enumerate(runs)]
    losses = itertools.chain.from_iterable(curve.losses() for curve in curves)
    plots = [{**_plot("Loss in nats per token", unit, losses), "wide": True}]
    for field, title in _FIELDS.items():
        traces = [curve.field(field) for curve in curves if field in curve.run.steps]
        if field == "exchange_share":
            traces = [t for t in traces if max((y or 0 for y in t["y"]), default=0) > _SMALL_SHARE]
        if traces:
            plots.append(_plot(title, unit, traces))
    return plots


def runs_of(section: Section) -> list[RunMetrics]:
    return [run for group in section.groups for run in group.runs]


def line_style(index: int) -> dict[str, str]:
    """Return the color and the dashes of a run. 18 runs have different styles."""
    dash = list(_DASHES)[index // len(COLORS) % len(_DASHES)]
    return {"color": COLORS[index % len(COLORS)], "dash": dash}


def css_line(index: int) -> str:
    """Return the style of a run as the CSS style of a border."""
    style = line_style(index)
    return f"{_DASHES[style['dash']]} {style['color']}"


def plain_text(text: str) -> str:
    """Escape a text for plotly.js, which reads tags such as <b> in its texts."""
    return html.escape(text, quote=False)


def _plot(title: str, unit: str, traces: Iterable[Plot]) -> Plot:
    return {"title": title, "unit": unit, "data": list(traces)}


class _Curves:
    """The traces of a run. The page changes `x` to epochs, tokens or time with their `meta`."""

    def __init__(self, index: int, run: RunMetrics, unit: int, limit: int):
        self.run, self._unit, self._limit, self._clock = run, unit, limit, run.clock()
        self._meta = {
            "run": index,
            "name": plain_text(run.name),
            "epochs": 1 / (run.start.get("steps_per_epoch") or math.nan),
            "tokens": run.tokens_per_step,
        }
        if not math.isfinite(self._meta["epochs"]):
            del self._meta["epochs"]
        self._style = line_style(index)

    def field(self, name: str) -> Plot:
        """Return the trace of a field of step events."""
        return self._line(self.run.steps[name], width=1.5)

    def losses(self) -> list[Plot]:
        """Return the raw and the smoothed loss, validations, restarts and checkpoints."""
        steps = self.run.steps["step"]
        raw = self.run.steps.get("loss", np.full(len(steps), math.nan))
        smoothed = _moving_average(raw, max(len(raw) // 50, 1))
        traces = [
            {**self._line(raw, width=1), "opacity": 0.3, "hoverinfo": "skip"},
            self._line(smoothed, width=2),
        ]
        validated = [e for e in self.run.events if e.get("valid_perplexity", 0) > 0]
        perplexities = [event["valid_perplexity"] for event in validated]
        at = [event["step"] for event in validated]
        traces.append({
            **self._points(at, np.log(perplexities), "circle", "validation loss %{y:.4f}"),
            "customdata": numbers(perplexities),
        })  # fmt: skip
        traces[-1]["mode"] = "lines+markers"
        traces[-1]["line"] = {**self._style, "width": 1}
        traces[-1]["hovertemplate"] += ", perplexity %{customdata:.2f}"
        for steps_done, symbol, text in (
            (_restarts(self.run), "triangle-up", "restart"),
            (_checkpoints(self.run), "diamond-open", "checkpoint"),
        ):
            if steps_done and len(steps):
                losses = np.interp(steps_done, steps, smoothed)
                traces.append(self._points(steps_done, losses, symbol, text))
        return traces

    def _line(self, values: np.ndarray, width: float) -> Plot:
        kept = _thinned(values, self._limit)
        style = {"mode": "lines", "line": {**self._style, "width": width}}
        return {**self._trace(self.run.steps["step"][kept], values[kept], "%{y:.5g}"), **style}

    def _points(self, steps: Sequence[int], values: np.ndarray, symbol: str, text: str) -> Plot:
        marker = {"color": self._style["color"], "symbol": symbol, "size": 8}
        return {
            **self._trace(np.array(steps, float), values, text),
            "mode": "markers",
            "marker": marker,
        }

    def _trace(self, steps: np.ndarray, values: np.ndarray, text: str) -> Plot:
        times = numbers(np.interp(steps, *self._clock) / self._unit)
        return {
            "x": numbers(steps),
            "y": numbers(values),
            "meta": {**self._meta, "time": times},
            "hovertemplate": f"%{{meta.name}}<br>at %{{x}}: {text}<extra></extra>",
        }


def _restarts(run: RunMetrics) -> list[int]:
    return [start.get("resumed_from_step", 0) for start in run.starts[1:]]


def _checkpoints(run: RunMetrics) -> list[int]:
    """Return the steps of the checkpoints that the run directory contains."""
    try:
        names = os.listdir(os.path.join(run.directory, CHECKPOINTS_DIR))
    except OSError:
        return []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name))


def _moving_average(values: np.ndarray, size: int) -> np.ndarray:
    """Return the mean of each value and up to `size` - 1 earlier values, without NaN."""
    known = np.isfinite(values)
    sums, counts = (np.cumsum(np.insert(np.where(known, v, 0.0), 0, 0)) for v in (values, 1.0))
    start = np.maximum(np.arange(1, len(values) + 1) - size, 0)
    with np.errstate(all="ignore"):
        return (sums[1:] - sums[start]) / (counts[1:] - counts[start])


def _thinned(values: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of at most `limit` values, which include all extremes."""
    if len(values) <= limit:
        return np.arange(len(values))
    blocks = np.array_split(np.nan_to_num(values), limit // 2)
    starts = np.cumsum([0, *map(len, blocks[:-1])])
    lows = starts + [block.argmin() for block in blocks]
    highs = starts + [block.argmax() for block in blocks]
    return np.unique([*lows, *highs])


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return numbers for a plot, with six digits. None leaves a gap.

    JSON has no NaN, and the libraries fail on numbers of which they cannot compute products.
    """
    return [float(f"{value:.6g}") if abs(value) < _MAX_VALUE else None for value in values]
