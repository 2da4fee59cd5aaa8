"""The report of the files of `lm.benchmark`: tables, and plots for the page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lm.errors import UserError, printable
from lm.record import read_object
from lm.report.plots import plain_text
from lm.report.tables import Table

# The list of rows that each benchmark measures.
_ROWS = {
    "step": "implementations",
    "products": "products",
    "scaling": "rows",
    "advise": "predictions",
    "trace": "parts",
}
_BARS = {  # column of a row -> title
    "ms_per_step": "Milliseconds per step",
    "share_of_gemm_peak": "Share of the peak of matrix products",
    "speed_over_onednn": "Cost of exactness: speed of our products divided by oneDNN's",
}
_AXES = {"xaxis": "ranks", "yaxis": "speedup"}
_WORK = {"strong": "the same global batch", "weak": "the same rows per rank"}
_NAMES = "implementation", "product"  # the columns that name a bar


class Benchmark(NamedTuple):
    """A file of `lm.benchmark`."""

    kind: str
    name: str
    command: str
    rows: Sequence[Mapping[str, Any]]

    def points(self, column: str) -> list[tuple[Any, float]]:
        """Return the name, or the number of ranks, and a finite value of each row."""
        found = []
        for row in self.rows:
            value = row.get(column)
            value = value.get("value") if isinstance(value, dict) else value
            if isinstance(value, int | float) and math.isfinite(value):
                name = next((row[key] for key in (*_NAMES, "ranks") if key in row), "")
                found.append((name, value))
        return found


def read_benchmark(path: str) -> Benchmark:
    """Read a file, or raise UserError if `lm.benchmark` did not write it."""
    record = read_object(path) or {}
    kind = str(record.get("benchmark"))
    rows, config = record.get(_ROWS.get(kind)), record.get("config")
    if not isinstance(config, dict) or not isinstance(rows, list) or not rows:
        raise UserError(f"{path} is not a file of lm.benchmark")
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} is corrupt: {_ROWS[kind]} must contain objects")
    facts = config.get("name"), config.get("precision"), record.get("cpu")
    name = f"{kind}: {', '.join(str(fact) for fact in facts if fact)}"
    return Benchmark(kind, printable(name), str(record.get("command", "")), rows)


def build_table(benchmark: Benchmark) -> Table:
    """Return the rows of a benchmark, without the lists of single measurements."""
    names = dict.fromkeys(name for row in benchmark.rows for name in row)
    for row in benchmark.rows:
        for name, value in row.items():
            if isinstance(value, list):
                names.pop(name, None)
    rows = [[_cell(row.get(name)) for name in names] for row in benchmark.rows]
    return Table(benchmark.name, benchmark.command, list(names), rows)


def build_plots(benchmarks: Sequence[Benchmark]) -> Iterator[dict[str, Any]]:
    """Yield the plots for plotly.js."""
    for column, title in _BARS.items():
        bars = [_trace(each.name, each.points(column), type="bar") for each in benchmarks]
        if bars := [bar for bar in bars if bar["x"]]:
            yield {"title": title, "data": bars, "layout": {"showlegend": len(bars) > 1}}
    for scaling in ("strong", "weak"):
        lines = []
        for each in benchmarks:
            rows = [row for row in each.rows if row.get("scaling") == scaling]
            style = {"dash": "dash" if each.kind == "advise" else "solid"}
            if points := each._replace(rows=rows).points("speedup"):
                lines.append(_trace(each.name, points, mode="lines+markers", line=style))
        if lines:
            axes = {name: {"type": "log", "title": {"text": text}} for name, text in _AXES.items()}
            title = f"Scaling with {_WORK[scaling]} (dashed: predictions of advise)"
            yield {"title": title, "data": lines, "layout": {**axes, "showlegend": True}}


def _trace(name: str, points: Sequence[tuple[Any, float]], **style: Any) -> dict[str, Any]:
    x = [at if isinstance(at, int) else plain_text(str(at)) for at, _ in points]
    return {"name": plain_text(name), "x": x, "y": [value for _, value in points], **style}


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        interval = value.get("interval") or ()
        limits = f" [{', '.join(map(_cell, interval))}]" if interval else ""
        return f"{_cell(value.get('value'))}{limits}"
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
