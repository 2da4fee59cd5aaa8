"""The report of the files of `lm.benchmark`: tables, and plots for the page."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lm.cli.markdown import object_table
from lm.errors import UserError, printable
from lm.json_files import read_object
from lm.report.plots import plain_text
from lm.report.tables import Table

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
    kind, config = record.get("benchmark"), record.get("config")
    # The only list of objects in a file contains the rows.
    rows = next(filter(_is_table, record.values()), None)
    if not kind or not isinstance(config, dict) or not rows:
        raise UserError(f"{path} is not a file of lm.benchmark")
    facts = config.get("name"), config.get("precision"), record.get("cpu")
    # The name of the file separates measurements that differ in other facts, such as threads.
    stem = os.path.basename(path).removesuffix(".json")
    name = f"{stem}: {', '.join(str(fact) for fact in facts if fact)}"
    return Benchmark(kind, printable(name), str(record.get("command", "")), rows)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def build_table(benchmark: Benchmark) -> Table:
    """Return the rows of a benchmark, without the lists of single measurements."""
    return Table(benchmark.name, benchmark.command, *object_table(benchmark.rows))


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
