"""What a reader of a fit must know: tests of its residuals for what the law leaves out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ._scipy import stats
from ._spans import Floats

FEW = 10
"""From as many samples on, how work depends on the load can be fitted."""
COMMON = 2.5
"""The variance between times over that within them, from which on all are slow together."""
_SURE = 4.0
"""Standard deviations, from which on a deviation is no chance."""
_LEAST_SPREAD = 5e-3
"""Relative: where work differs by less, what is left are the rounding errors of clocks."""
_HEAVY = 2.5
"""Below this tail index, the variance of a recording says little about that of the next one."""
_PER_PLACE = 15
"""Samples for each of P, so that the mean of the longest of P is known to some percent."""


def autocorrelation(residuals: Sequence[Floats]) -> float:
    """Of each with the one before it, in [-0.9, 0.9]; 0.0 if there are few."""
    num = sum(len(each) for each in residuals)
    total = sum(float(each @ each) for each in residuals)
    if num <= 30 or total <= 0.0:
        return 0.0
    lagged = sum(float(each[1:] @ each[:-1]) for each in residuals)
    return min(max(lagged / total, -0.9), 0.9)


def inflation(correlation: float) -> float:
    """How much greater the variance of a mean is than that of independent samples, >= 1."""
    positive = min(max(correlation, 0.0), 0.9)
    return (1.0 + positive) / (1.0 - positive)


def block_length(correlation: float, num: int) -> int:
    """How many samples in a row a bootstrap draws: Politis and White's rule for such a process."""
    if num <= 30 or correlation <= 3.0 / math.sqrt(num):
        return 1
    persistence = 2.0 * correlation / (1.0 - correlation * correlation)
    return max(2, round(1.1 * math.cbrt(num) * math.cbrt(persistence) ** 2))


def drift(residuals: Sequence[Floats], correlation: float) -> str:
    """A note if the second half of a recording differs from the first beyond chance."""
    for each in residuals:
        half = len(each) // 2
        if half < 15:
            continue
        first, second = each[:half], each[half:]
        error = math.sqrt(
            inflation(correlation) * (first.var() / len(first) + second.var() / len(second))
        )
        change = float(second.mean() - first.mean())
        if error > 0.0 and abs(change) > _SURE * error and abs(change) > 0.01:
            return (
                f"the second half of a recording takes {100 * math.expm1(change):+.0f} % of the "
                "first: it drifts, so what comes later may differ from all that was recorded"
            )
    return ""


def variance_ratio(groups: Sequence[Floats]) -> tuple[float, float]:
    """(The variance between groups over that within, 1 if they are alike; by how many sigma)."""
    num, total = len(groups), sum(map(len, groups))
    if num < 2 or total <= num:
        return 1.0, 0.0
    mean = float(np.concatenate(groups).mean())
    between = sum(len(each) * (float(each.mean()) - mean) ** 2 for each in groups) / (num - 1)
    within = sum(len(each) * float(each.var()) for each in groups) / (total - num)
    if within <= 0.0:
        return (math.inf, math.inf) if between > 0.0 else (1.0, 0.0)
    ratio = between / within
    return ratio, float(stats.norm.isf(stats.f.sf(ratio, num - 1, total - num)))


def common_slowness(begun: Floats, residuals: Floats) -> float:
    """The greatest variance between bins of time over that within them, if it is no chance."""
    found = 1.0
    secs = float(begun[-1] - begun[0]) if len(begun) else 0.0
    if len(begun) <= 60 or secs <= 0.0 or float(residuals.std()) < _LEAST_SPREAD:
        return found
    for num_bins in (100, 40, 16):
        bins = np.minimum(((begun - begun[0]) / secs * num_bins).astype(int), num_bins - 1)
        parts = np.split(residuals, np.flatnonzero(np.diff(bins)) + 1)
        groups = [each for each in parts if len(each) >= 5]
        if len(groups) >= 5:
            ratio, sigmas = variance_ratio(groups)
            if sigmas > _SURE:
                found = max(found, ratio)
    return found


def do_workers_differ(residuals: Floats, workers: NDArray[np.int64]) -> bool:
    """Whether workers differ in speed, beyond chance."""
    known = np.unique(workers)
    if len(known) < 2 or len(residuals) <= 4 * len(known):
        return False
    groups = [residuals[workers == each] for each in known]
    return variance_ratio(groups)[1] > 3.5


def cuts(works: Floats, cut: Floats) -> list[str]:
    """Notes on work that was cut, beside what ended."""
    share = len(cut) / (len(works) + len(cut))
    longest = float(works.max())
    beyond = float(np.count_nonzero(cut >= longest)) / (len(works) + len(cut))
    notes = []
    if share >= 0.01:
        notes.append(f"{100 * share:.0f} % of it was cut, so it is longer than what was seen")
    if beyond > 0.01:
        notes.append(
            f"{100 * beyond:.0f} % was cut after more than {longest:.3g} s, the longest that "
            "ended: how much longer it takes is not known"
        )
    return notes


def slow_together(ratio: float) -> str:
    """A note if all work was slow at the same times."""
    if ratio <= COMMON:
        return ""
    return (
        f"all of it was slow at the same times (F {ratio:.1f}, 1.0 by chance), and it is drawn "
        "without regard to that: rates may be off by 10 %"
    )


def unknown_load(slowdowns: tuple[float, float], *, has_load: bool) -> str:
    """A note if the load says little of the slowdown, which is between these."""
    low, high = slowdowns
    if not has_load:
        return "how several would share it is not known; record a run with more under way"
    if high - low <= max(0.05, 0.5 * low):
        return ""
    return (
        f"the load hardly varied, or too few ended: a slowdown of {low:.2g} to {high:.2g} for each "
        "further one is as likely; record another load as well"
    )


def few(num: int) -> str:
    """A note if too few have ended."""
    return "" if num >= FEW else f"only {num} ended; {FEW} are the least for a law"


def one_size(sizes: Floats) -> str:
    """A note on sizes of which no law follows, if any is known."""
    if not np.isfinite(sizes).any():
        return ""
    return (
        f"only size {np.nanmax(sizes):g} was recorded, so it is not known how it depends on the "
        "size"
    )


def tails(samples: Floats, num_together: int, correlation: float) -> list[str]:
    """Notes if so few samples do not determine the mean, or the longest of those together."""
    num, mean = len(samples), float(samples.mean())
    notes: list[str] = []
    if num < FEW or mean <= 0.0:
        return notes
    error = float(samples.std()) / mean * math.sqrt(inflation(correlation) / num)
    top = np.sort(samples)[-max(10, num // 50) - 1 :]
    excess = float(np.log(top[1:] / top[0]).mean()) if top[0] > 0 and num >= 100 else 0.0
    index = 1.0 / excess if excess > 0.0 else math.inf
    if index < _HEAVY:
        notes.append(
            f"its tail is heavy (index {index:.1f}): work longer than the longest that was "
            f"recorded, {samples.max():.3g} s, must be expected"
        )
    if error > 0.04:
        notes.append(f"its mean is known to {100 * 1.645 * error:.0f} % at 90 %; record for longer")
    if num_together > 1 and num < _PER_PLACE * num_together and error > 0.01:
        notes.append(
            f"{num} samples do not determine the longest of {num_together} at a time; "
            f"{_PER_PLACE * num_together} do"
        )
    return notes
