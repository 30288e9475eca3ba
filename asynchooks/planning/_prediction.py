"""Prediction: figures of a planned setting with intervals, made of several runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import _check
from ..simulation.output._interval import student_t
from ._trace import Figures

FLOOR, FLOOR_BEYOND = 0.015, 0.03
"""Shares of a figure by which its interval is wide at least, within the recorded load and beyond:
where a service is used to its end, all that no span shows makes it slower."""
_MOST_EXCESS = 0.10
"""Of a prediction's error beyond chance: above it the model is wrong."""
FIGURES = ("rate", "staleness", "max_staleness", "idle_share")


class Estimate(NamedTuple):
    """A number and its 90 % interval; NaN where there is no such number.

    Example:
        rate = plan.predict(main, concurrency=64).rate
        print(f"{rate.value:.1f} updates/s, between {rate.low:.1f} and {rate.high:.1f}")
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "none"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def covers(self, value: float) -> bool:
        """Whether the interval contains this number."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Prediction:
    """What one setting of a program would give. `Plan.predict` makes it.

    The interval holds what one run as long as the planned one would give, in 90 of 100 cases, where
    `is_extrapolated` is False. Else it holds what is possible, and `value` is one guess within.

    Example:
        prediction = plan.predict(main, concurrency=64)
        print(prediction)
        print(prediction.secs_to(10_000), prediction.cost(10_000, price_per_hour=12.0))
    """

    settings: Mapping[str, Any]
    """The arguments of the program."""
    rate: Estimate
    """Updates per second."""
    staleness: Estimate
    """Mean of what was used, in steps."""
    max_staleness: Estimate
    """The greatest of one run, in steps."""
    idle_share: Estimate
    """Of the sessions' time, between 0 and 1."""
    is_extrapolated: bool
    """Whether it rests on what was not recorded, such as a load; `notes` say on what."""
    notes: tuple[str, ...]
    """What the prediction rests on that was not recorded, and what else a reader must know."""
    num_runs: int
    """In virtual time, of which it is made."""

    def secs_to(self, num_updates: int) -> Estimate:
        """Seconds until so many updates are made.

        Raises:
            TypeError, ValueError: `num_updates` is no integer >= 1.
        """
        num = _check.integer("num_updates", num_updates, least=1)
        value, most, least = (num / each if each > 0 else math.inf for each in self.rate)
        return Estimate(value, least, most)

    def cost(self, num_updates: int, price_per_hour: float) -> Estimate:
        """What so many updates cost, in the unit of the price.

        Raises:
            TypeError, ValueError: `num_updates` is no integer >= 1, or the price is below 0.
        """
        price = _check.number("price_per_hour", price_per_hour, least=0.0)
        return Estimate(*(each * price / 3600.0 for each in self.secs_to(num_updates)))

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        lines = [
            f"{settings or 'no settings'}:"
            f" {self.rate} updates/s, staleness {self.staleness}"
            f" (at most {self.max_staleness}), idle {self.idle_share}"
        ]
        if self.is_extrapolated:
            lines[0] += "; beyond what was recorded"
        return "\n".join([*lines, *(f"  {each}" for each in self.notes)])


@dataclass(frozen=True)
class Check:
    """A recorded setting: what was measured beside what the plan says. `Plan.check` makes it.

    Example:
        check = plan.check(main)
        assert not check.is_mismatch, check
    """

    measured: Figures
    """Of the recorded run."""
    prediction: Prediction
    """Of its settings."""

    def error(self, name: str) -> float:
        """Relative error of a figure, without what chance explains; NaN if there is no figure.

        Args:
            name: "rate", "staleness", "max_staleness" or "idle_share".

        Raises:
            ValueError: there is no such figure.
        """
        off, chance = self._off(name)
        return math.sqrt(max(0.0, off * off - chance * chance))

    def _off(self, name: str) -> tuple[float, float]:
        if name not in FIGURES:
            raise ValueError(f"name is {name!r}; give one of {', '.join(FIGURES)}")
        measured, estimate = getattr(self.measured, name), getattr(self.prediction, name)
        if not estimate.value > 0 or math.isnan(measured):
            return (math.nan, math.nan) if math.isnan(measured) else (0.0, 0.0)
        side = estimate.high if measured > estimate.value else estimate.low
        return abs(measured / estimate.value - 1.0), abs(side / estimate.value - 1.0)

    @property
    def is_mismatch(self) -> bool:
        """Whether the rate or the mean staleness is missed by more than 10 % beyond chance."""
        found = (self._off(name) for name in ("rate", "staleness"))
        return any(off - chance > _MOST_EXCESS for off, chance in found)

    def reasons(self) -> str:
        """What may be the cause of a mismatch."""
        return (
            "Perhaps work that takes time is not timed; or a timed call holds a queue, or other "
            "timed work, which is then counted twice; or the program has changed since, or other "
            "work was done on the machine"
        )

    def __str__(self) -> str:
        return "\n".join(
            f"{label}: measured {getattr(self.measured, name):.4g}, "
            f"predicted {getattr(self.prediction, name)}"
            for name, label in (("rate", "updates/s"), ("staleness", "staleness"))
            if not math.isnan(getattr(self.measured, name))
        )


def estimates(
    runs: Sequence[Figures],
    extremes: Sequence[Figures],
    errors: Mapping[str, float],
    *,
    is_extrapolated: bool,
) -> dict[str, Estimate]:
    """One estimate for each figure.

    Args:
        runs: of one setting, each with services of its own that might as well have been recorded.
        extremes: runs under other assumptions, which the intervals are to hold as well.
        errors: by name of a figure: the model's own relative error.
        is_extrapolated: whether the setting is beyond what was recorded.
    """
    floor = FLOOR_BEYOND if is_extrapolated else FLOOR
    found = {}
    for name in FIGURES:
        known, others = (
            [value for each in some if not math.isnan(value := getattr(each, name))]
            for some in (runs, extremes)
        )
        if not known:
            found[name] = Estimate(math.nan, math.nan, math.nan)
            continue
        num, mean, is_share = len(known), float(np.mean(known)), name == "idle_share"
        half = math.inf
        if num > 1:
            spread = float(np.std(known, ddof=1)) * math.sqrt(1.0 + 1.0 / num)
            least = floor if is_share else floor * mean
            half = math.hypot(student_t(num - 1) * spread, least, errors.get(name, 0.0) * mean)
        # each of the others is a run, with chance of its own
        share = 0.0 if is_share or mean <= 0 else half / mean
        low = min([mean - half, *(each * max(0.0, 1.0 - share) for each in others)])
        high = max([mean + half, *(each * (1.0 + share) for each in others)])
        found[name] = Estimate(mean, max(0.0, low), min(high, 1.0) if is_share else high)
    return found
