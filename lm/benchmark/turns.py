"""Tasks that take turns, and the statistics of their repeats."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm import logger
from lm.benchmark import worker
from lm.benchmark.worker import Options, Task
from lm.options import option

# Two-sided 95% quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class RepeatedOptions(Options):
    """Options of the commands whose tasks take turns."""

    repeats: int = option(8, "measurements of each kind", low=1)


def take_turns(
    groups: Sequence[Mapping[Any, Task]], options: RepeatedOptions, hosts: str | None = None
) -> dict[Any, dict[str, list]]:
    """Run rounds of all tasks, and return the results of each task as lists by round.

    The speed of a machine changes within minutes. In each round, all tasks see the same state of
    the machine. The tasks of a group share their processes, because many ranks start slowly.
    """
    rounds = []
    for number in range(1, options.repeats + 1):
        results: dict[Any, dict[str, Any]] = {}
        for group in groups:
            results.update(zip(group, worker.run([*group.values()], options, hosts)))
        rounds.append(results)
        logger.info("repeat %d of %d", number, options.repeats)
    return {
        name: {key: [results[name][key] for results in rounds] for key in rounds[0][name]}
        for name in rounds[0]
    }


def speeds(tokens: int, seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the median, the best and the standard deviation of the tokens per second."""
    found = [tokens / each for each in seconds]
    std = statistics.stdev(found) if len(found) > 1 else None
    return {"tokens_per_second": statistics.median(found), "best": max(found), "std": std}


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % confidence interval, which is None for a single pair."""

    value: float
    interval: tuple[float, float] | None = None


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
