"""Tasks that take turns, and the statistics of their repeats."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm import logger
from lm.benchmark import worker
from lm.benchmark.worker import Options, Task
from lm.cli.markdown import markdown_table
from lm.options import option

# Two-sided 95% quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class RepeatedOptions(Options):
    """Options of the commands whose tasks take turns."""

    repeats: int = option(8, "measurements of each kind", low=1)


def take_turns(
    groups: Sequence[Mapping[Any, Task]], options: RepeatedOptions
) -> dict[Any, dict[str, list]]:
    """Run rounds of all tasks, and return the results of each task as lists by round.

    The speed of a machine changes within minutes. In each round, all tasks see the same state of
    the machine. The tasks of a group share their processes, because many ranks start slowly.
    """
    rounds = []
    for number in range(1, options.repeats + 1):
        results: dict[Any, dict[str, Any]] = {}
        for group in groups:
            results.update(zip(group, worker.run([*group.values()], options)))
        rounds.append(results)
        logger.info("repeat %d of %d", number, options.repeats)
    return {
        name: {key: [results[name][key] for results in rounds] for key in rounds[0][name]}
        for name in rounds[0]
    }


def speeds(tokens: int, seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the best and the standard deviation of the tokens per second."""
    found = [tokens / each for each in seconds]
    std = statistics.stdev(found) if len(found) > 1 else 0.0
    return {"tokens_per_second": statistics.median(found), "best": max(found), "std": std}


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % confidence interval, which is None for a single pair."""

    value: float
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        low_high = f" [{self.interval[0]:.2f}, {self.interval[1]:.2f}]" if self.interval else ""
        return f"{self.value:.2f}{low_high}"


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], factor: float = 1.0
) -> Ratio:
    """Compare two tasks that took turns. The ratios are multiplied by `factor`.

    Drift cancels in the ratio of two values of the same round. The result is the geometric mean of
    these ratios (Fleming and Wallace 1986, "How not to lie with statistics"). The interval is
    Student's t interval for the mean of the logarithms.
    """
    logs = [math.log(factor * a / b) for a, b in zip(numerators, denominators)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean))
    degrees = len(logs) - 1
    t = _T_95[degrees - 1] if degrees <= len(_T_95) else 1.96 + 2.37 / degrees + 2.8 / degrees**2
    margin = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), (math.exp(mean - margin), math.exp(mean + margin)))


def print_record(record: Mapping[str, Any]) -> None:
    """Print the values of a record, and then a table for each list of rows."""
    for name, value in record.items():
        if isinstance(value, list):
            names = [name for name, cell in value[0].items() if not isinstance(cell, list)]
            table = markdown_table(
                names, [[_cell(row.get(name, "-")) for name in names] for row in value]
            )
            print(f"\n{name}\n\n{table}")
        else:
            print(f"{name}: {_cell(value)}")


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
