"""Interval: a mean of several values with what it may be, by Student's t and by batch means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782)
"""Of Student's t for 1, 2, ... degrees of freedom: 95 % lie below, so 90 % between -t and t."""
_NUM_BATCHES = 20
_LEAST_BATCHES = 5
_MOST_CORRELATED = 0.3
"""Between neighbours; above it batches are too short, and two are made one."""
_TOO_CORRELATED = 0.6
"""Between neighbours of all batches: above it, even the longest depend on each other. Of batches
that do not, one run in a thousand has so much by chance."""


class Interval(NamedTuple):
    """A mean and its 90 % confidence interval.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(8, compute=Exponential(1.0))
        interval = cluster.run(updates=20_000, warm_up=10.0).interval()
        assert interval.low < 8.0 * 1.02
        assert interval.high > 8.0 * 0.98
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def student_t(num_degrees: int) -> float:
    """Of which 90 % lie between -t and t."""
    if num_degrees < 1:
        return math.inf
    if num_degrees <= len(_T95):
        return _T95[num_degrees - 1]
    return 1.645 + 1.52 / num_degrees + 1.0 / num_degrees**2


def interval_of(values: Sequence[float]) -> Interval:
    """Of the mean of independent values; infinitely wide for one alone.

    Its ends are not a number where a value is not finite.
    """
    if not all(map(math.isfinite, values)):
        return Interval(sum(values) / len(values), math.nan, math.nan)
    num, mean = len(values), math.fsum(values) / len(values)
    if num < 2:
        return Interval(mean, -math.inf, math.inf)
    spread = math.sqrt(math.fsum((each - mean) ** 2 for each in values) / (num - 1) / num)
    half = student_t(num - 1) * spread
    return Interval(mean, mean - half, mean + half)


def rate_by_batches(points: Sequence[tuple[float, int]]) -> Interval:
    """The rate of a counter and its interval, by batch means: of equal parts of the time.

    Neighbours must not depend on each other, so two of them are made one until they do not.

    Args:
        points: (seconds, value), in order; they are taken to be on a line between two.

    Raises:
        ValueError: there are too few of them, or the rate changes so slowly that even the longest
            parts depend on each other.

    Source: batch means, the usual method for one long run of a simulation.
    """
    if len(points) < 4 * _NUM_BATCHES:
        raise ValueError(
            f"{len(points)} points of the updates behind the warm-up are too few for an interval; "
            f"let training make at least {4 * _NUM_BATCHES} updates after it"
        )
    times, values = (np.array(each, np.float64) for each in zip(*points, strict=True))
    num = _NUM_BATCHES
    while True:
        edges = np.linspace(times[0], times[-1], num + 1)
        rates = np.diff(np.interp(edges, times, values)) / np.diff(edges)
        rest = rates - rates.mean()
        total = float((rest * rest).sum())
        correlation = float((rest[1:] * rest[:-1]).sum()) / total if total > 0 else 0.0
        if num == _NUM_BATCHES and correlation > _TOO_CORRELATED:
            raise ValueError(
                f"the rates of {num} equal parts of the time depend on each other (correlation "
                f"{correlation:.2f} of neighbours), so the run is too short for an interval; let "
                "it train for several times as long, or give a longer warm_up"
            )
        if correlation <= _MOST_CORRELATED or num // 2 < _LEAST_BATCHES:
            return interval_of(rates.tolist())
        num //= 2
