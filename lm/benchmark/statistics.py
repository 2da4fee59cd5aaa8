"""Means, spreads and ratios of repeated measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Summary(NamedTuple):
    """A measurement over its repeats."""

    mean: float
    std: float  # of a single repeat, n - 1 in the denominator; 0 where there is one repeat
    median: float


class Ratio(NamedTuple):
    """A ratio with its 95 % confidence interval, which is infinite for a single pair."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Ratio:
        """Return the ratio and its interval times a factor."""
        return Ratio(*(factor * value for value in self))

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def summarize(values: Sequence[float]) -> Summary:
    """Return the mean, standard deviation and median of at least one value."""
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return Summary(statistics.fmean(values), std, statistics.median(values))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Compare two measurements that were taken in turn, A B A B.

    Neighbours see the same state of the machine, so drift cancels in each pair. The value is
    the geometric mean of the pairs' ratios; the interval is Student's t interval for the mean of
    their logarithms (Fleming and Wallace 1986, "How not to lie with statistics", on why the
    mean of ratios must be geometric).

    Args:
      numerators: One value for each repeat, positive.
      denominators: The values measured beside them.
    """
    logs = [math.log(a / b) for a, b in zip(numerators, denominators)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    degrees = len(logs) - 1
    t = _T_95[degrees - 1] if degrees <= len(_T_95) else 1.96 + 2.4 / degrees
    margin = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - margin), math.exp(mean + margin))


class Line(NamedTuple):
    """y = intercept + slope * x."""

    intercept: float
    slope: float


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line with non-negative coefficients that minimizes the squared RELATIVE errors.

    Message sizes span six orders of magnitude: with absolute errors the largest one alone would
    decide, and the latency would come out as noise.

    Args:
      points: (x, y) with y > 0, of two x or more.
    """
    x, y = np.array(points, dtype=float).T
    columns = np.stack([1 / y, x / y], axis=1)
    line = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
    if line.min() < 0:  # at most one is: y is not
        kept = line >= 0
        best = np.linalg.lstsq(columns[:, kept], np.ones_like(y), rcond=None)[0]
        line = np.zeros(2)
        line[kept] = best
    return Line(*line.tolist())
