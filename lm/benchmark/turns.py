"""Tasks that take turns, and the statistics of their repeats."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.benchmark import worker
from lm.benchmark.worker import Options, Task
from lm.cli.tables import markdown_table

# Two-sided 95 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

logger = logging.getLogger("lm")


def take_turns(tasks: Mapping[Any, Task], options: Options) -> dict[Any, dict[str, list]]:
    """Run rounds of all tasks, and return the results of each task as lists by round.

    The speed of a machine changes within minutes. In each round, all tasks see the same state of
    the machine.
    """
    rounds = []
    for number in range(1, options.repeats + 1):
        rounds.append({name: worker.run(task, options) for name, task in tasks.items()})
        logger.info("repeat %d of %d", number, options.repeats)
    return {
        name: {key: [results[name][key] for results in rounds] for key in rounds[0][name]}
        for name in tasks
    }


def speeds(words: int, seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the best and the standard deviation of the words per second."""
    found = [words / each for each in seconds]
    std = statistics.stdev(found) if len(found) > 1 else 0.0
    return {"words_per_second": statistics.median(found), "best": max(found), "std": std}


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % confidence interval, which is None for a single pair."""

    value: float
    interval: tuple[float, float] | None = None

    def __mul__(self, factor: float) -> Ratio:
        low_high = self.interval and (factor * self.interval[0], factor * self.interval[1])
        return Ratio(factor * self.value, low_high)

    def __str__(self) -> str:
        low_high = f" [{self.interval[0]:.2f}, {self.interval[1]:.2f}]" if self.interval else ""
        return f"{self.value:.2f}{low_high}"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Compare two tasks that took turns.

    Drift cancels in the ratio of two values of the same round. The result is the geometric mean of
    these ratios (Fleming and Wallace 1986, "How not to lie with statistics"). The interval is
    Student's t interval for the mean of the logarithms.
    """
    logs = [math.log(a / b) for a, b in zip(numerators, denominators)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean))
    degrees = len(logs) - 1
    t = _T_95[degrees - 1] if degrees <= len(_T_95) else 1.96 + 2.4 / degrees
    margin = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), (math.exp(mean - margin), math.exp(mean + margin)))


def print_table(columns: Sequence[tuple[str, str]], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a table. Each column has a header and a format string for the values of a row."""
    cells = [[form.format_map(row) for _, form in columns] for row in rows]
    print(markdown_table([header for header, _ in columns], cells))
