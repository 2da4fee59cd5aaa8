"""Plots of runs by step, for plotly.js: each plot has traces and a layout, as its JSON schema."""

import html
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lm.report.comparison import Section
from lm.report.metrics import RunMetrics

Plot = dict[str, Any]

# Okabe and Ito's colors, which color-blind readers can tell apart. The blue is lighter, so that it
# is visible on a dark page.
COLORS = "#1f87d2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
_DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot"}  # names in CSS and in plotly.js
_FIELDS = {
    "learning_rate": "Learning rate",
    "gradient_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "exchange_share": "Share of the gradient exchange",
}
_MAX_POINTS = 30_000  # points of each field, in all runs together
_MAX_POINTS_PER_LINE = 3_000
_MAX_ROWS = 12  # rows of marks
_MAX_VALUE = 1e100
_UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}


def build_plots(section: Section) -> list[Plot]:
    """Return the plots of a section: the loss, and the other fields of step events."""
    runs = section.runs
    limit = min(max(_MAX_POINTS // len(runs), 100), _MAX_POINTS_PER_LINE)
    unit, seconds = time_unit(runs)
    curves = [_Curves(index, run, seconds, limit) for index, run in enumerate(runs)]
    losses = itertools.chain.from_iterable(curve.losses() for curve in curves)
    plots = [{**_plot("Loss in nats per token", unit, losses), "wide": True}]
    for field, title in _FIELDS.items():
        shown = [curve for curve in curves if field in curve.run.steps]
        if field == "exchange_share":  # A single rank exchanges nothing.
            shown = [c for c in shown if any(e["world_size"] > 1 for e in c.run.starts)]
        if traces := [curve.field(field) for curve in shown]:
            plots.append(_plot(title, unit, traces))
    return plots


def time_unit(runs: Sequence[RunMetrics]) -> tuple[str, int]:
    """Return the name of a unit for the training times of runs, and its length in seconds."""
    longest = max(run.clock()[1][-1] for run in runs)
    return next((unit for unit in _UNITS.items() if longest > 2 * unit[1]), ("seconds", 1))


def line_style(index: int) -> tuple[str, str]:
    """Return the color and the dashes of a run. 18 runs have different styles."""
    dashes = list(_DASHES)[index // len(COLORS) % len(_DASHES)]
    return COLORS[index % len(COLORS)], dashes


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
            "tokens": run.tokens_per_step,
        }
        if steps_per_epoch := run.start.get("steps_per_epoch"):
            self._meta["epochs"] = 1 / steps_per_epoch
        self._color, dashes = line_style(index)
        self._line_style = {"color": self._color, "dash": _DASHES[dashes]}

    def field(self, name: str) -> Plot:
        """Return the trace of a field of step events."""
        return self._line(self.run.steps[name], width=1.5)

    def losses(self) -> list[Plot]:
        """Return the raw and the smoothed loss, validations, restarts and checkpoints."""
        raw = self.run.steps.get("loss", np.full(len(self.run.steps["step"]), math.nan))
        smoothed = _moving_average(raw, max(len(raw) // 50, 1))
        restarts = [start.get("resumed_from_step", 0) for start in self.run.starts[1:]]
        return [
            {**self._line(raw, width=1), "opacity": 0.3, "hoverinfo": "skip"},
            self._line(smoothed, width=2),
            self._validations(),
            *self._marks(restarts, "triangle-up", "restart"),
            *self._marks(self.run.checkpoint_steps, "line-ns-open", "checkpoint"),
        ]

    def _validations(self) -> Plot:
        validated = [e for e in self.run.events if e.get("valid_perplexity", 0) > 0]
        perplexities = [event["valid_perplexity"] for event in validated]
        text = "validation loss %{y:.4f}, perplexity %{customdata:.2f}"
        return {
            **self._trace([event["step"] for event in validated], np.log(perplexities), text),
            "customdata": numbers(perplexities),
            "mode": "lines+markers",
            "line": {**self._line_style, "width": 1},
            "marker": {"color": self._color, "size": 8},
        }

    def _marks(self, steps: Sequence[int], symbol: str, text: str) -> Iterator[Plot]:
        """Yield a trace of marks above the horizontal axis. Each run has a row of marks."""
        if steps:
            row = np.full(len(steps), self._meta["run"] % _MAX_ROWS)
            line = {"color": self._color, "width": 2}
            marker = {"color": self._color, "symbol": symbol, "size": 9, "line": line}
            trace = {**self._trace(steps, row, text), "yaxis": "y2"}
            yield {**trace, "mode": "markers", "marker": marker}

    def _line(self, values: np.ndarray, width: float) -> Plot:
        kept = _thinned(values, self._limit)
        style = {"mode": "lines", "line": {**self._line_style, "width": width}}
        return {**self._trace(self.run.steps["step"][kept], values[kept], "%{y:.5g}"), **style}

    def _trace(self, steps: Sequence[float], values: np.ndarray, text: str) -> Plot:
        times = numbers(np.interp(steps, *self._clock) / self._unit)
        return {
            "x": [float(step) for step in steps],
            "y": numbers(values),
            "meta": {**self._meta, "time": times},
            "hovertemplate": f"%{{meta.name}}<br>at %{{x}}: {text}<extra></extra>",
        }


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
