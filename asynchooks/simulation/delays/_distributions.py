"""Distributions of delays: with light tails, and mostly short but occasionally very long.

Draws that overflow a float become `LONGEST_SECS`; means and variances are those of the
distributions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from ..._check import number
from ._delay import LONGEST_SECS, Delay, Draws, checked_secs, checked_secs_above_zero, put

_CHECKS: dict[str, Callable[[str, object], float]] = {
    "secs": checked_secs,
    "mean": partial(checked_secs_above_zero, otherwise=", or Constant(0) for no delay"),
    "shift": checked_secs,
    "excess": partial(checked_secs_above_zero, otherwise=", or Constant(shift) for none"),
    "low": checked_secs,
    "high": checked_secs,
    "scale": checked_secs_above_zero,
    "shape": partial(number, above=0.0, expected="a finite number > 0"),
    "mu": number,
    "sigma": partial(number, least=0.0, expected="a finite number >= 0"),
}
"""By the name of a parameter, which means the same in all distributions."""


@dataclass(frozen=True, slots=True)
class Distribution(Delay):
    """A delay whose text is its kind and its parameters, as in "uniform:1.0,3.0"."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields(self):
            put(self, **{each.name: _CHECKS[each.name](each.name, getattr(self, each.name))})

    @classmethod
    def parameters(cls) -> list[str]:
        """Their names, as a text shows them."""
        return [each.name.upper() for each in fields(cls)]

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(repr(getattr(self, each.name)) for each in fields(self))}"


@dataclass(frozen=True, slots=True)
class Constant(Distribution):
    """Always the same duration.

    Args:
        secs: seconds, >= 0.

    Raises:
        TypeError, ValueError: the parameter is no number, or out of its range.

    Example:
        assert Constant(2.0).mean == 2.0
    """

    kind: ClassVar[str] = "constant"
    secs: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return np.full(size, self.secs)

    @property
    def mean(self) -> float:
        return self.secs

    @property
    def variance(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Exponential(Distribution):
    """Memoryless: P(X > x) = exp(-x / mean).

    Args:
        mean: seconds, > 0.

    Raises:
        TypeError, ValueError: the parameter is no number, or out of its range.

    Example:
        assert str(Exponential(2.0)) == "exponential:2.0"
    """

    kind: ClassVar[str] = "exponential"
    mean: float = field()  # without it, the property of the base would be its default

    def sample(self, rng: Generator, size: int) -> Draws:
        return rng.exponential(self.mean, size)

    @property
    def variance(self) -> float:
        return self.mean * self.mean


@dataclass(frozen=True, slots=True)
class ShiftedExponential(Distribution):
    """At least `shift`, then an exponential.

    Unlike `Exponential`, its mean is no parameter: it is the sum of both.

    Args:
        shift: seconds, >= 0.
        excess: the mean of the exponential, in seconds, > 0.

    Raises:
        TypeError, ValueError: a parameter is no number, or out of its range.

    Example:
        assert ShiftedExponential(0.5, 1.0).mean == 1.5
    """

    kind: ClassVar[str] = "shifted-exponential"
    shift: float
    excess: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return self.shift + rng.exponential(self.excess, size)

    @property
    def mean(self) -> float:
        return self.shift + self.excess

    @property
    def variance(self) -> float:
        return self.excess * self.excess


@dataclass(frozen=True, slots=True)
class Uniform(Distribution):
    """Uniform from `low` to `high`.

    Args:
        low: seconds, >= 0.
        high: seconds, >= low.

    Raises:
        TypeError, ValueError: a parameter is no number, or out of its range.

    Example:
        assert Uniform(1.0, 3.0).mean == 2.0
    """

    kind: ClassVar[str] = "uniform"
    low: float
    high: float

    def __post_init__(self) -> None:
        Distribution.__post_init__(self)
        if self.high < self.low:
            raise ValueError(f"low is {self.low} and high is {self.high}; give low <= high")

    def sample(self, rng: Generator, size: int) -> Draws:
        return rng.uniform(self.low, self.high, size)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def variance(self) -> float:
        return (self.high - self.low) * (self.high - self.low) / 12


@dataclass(frozen=True, slots=True)
class Pareto(Distribution):
    """A power law: P(X > x) = (scale / x)^shape for x >= scale.

    Args:
        scale: the shortest delay, in seconds, > 0.
        shape: > 0; up to 1 the mean is infinite, up to 2 the variance is.

    Raises:
        TypeError, ValueError: a parameter is no number, or out of its range.

    Example:
        assert Pareto(1.0, 3.0).mean == 1.5
    """

    kind: ClassVar[str] = "pareto"
    scale: float
    shape: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return _times(self.scale, 1.0 + rng.pareto(self.shape, size))  # numpy's begins at 0

    @property
    def mean(self) -> float:
        if self.shape <= 1:
            return math.inf
        return self.scale * (self.shape / (self.shape - 1))

    @property
    def variance(self) -> float:
        if self.shape <= 2:
            return math.inf
        less = self.shape - 1
        deviation = self.scale * math.sqrt(self.shape / less / less / (self.shape - 2))
        return deviation * deviation


@dataclass(frozen=True, slots=True)
class LogNormal(Distribution):
    """Its logarithm is normal.

    Args:
        mu: the mean of the logarithm (of seconds).
        sigma: the standard deviation of the logarithm, >= 0.

    Raises:
        TypeError, ValueError: a parameter is no number, or out of its range.

    Example:
        assert LogNormal(0.0, 0.0).mean == 1.0
    """

    kind: ClassVar[str] = "lognormal"
    mu: float
    sigma: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return np.minimum(rng.lognormal(self.mu, self.sigma, size), LONGEST_SECS)

    @property
    def mean(self) -> float:
        return _or_inf(math.exp, self.mu + self.sigma * self.sigma / 2)

    @property
    def variance(self) -> float:
        of_log = self.sigma * self.sigma
        if of_log == 0:
            return 0.0
        # exp(2 mu + s) (exp(s) - 1) as one power: the factors overflow before the product does
        return _or_inf(math.exp, 2 * (self.mu + of_log) + math.log(-math.expm1(-of_log)))


@dataclass(frozen=True, slots=True)
class Weibull(Distribution):
    """P(X > x) = exp(-(x / scale)^shape): below a shape of 1 heavier than an exponential.

    Args:
        scale: seconds, > 0.
        shape: > 0; 1 gives an exponential.

    Raises:
        TypeError, ValueError: a parameter is no number, or out of its range.

    Example:
        assert Weibull(2.0, 1.0).mean == 2.0
    """

    kind: ClassVar[str] = "weibull"
    scale: float
    shape: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return _times(self.scale, rng.weibull(self.shape, size))

    @property
    def mean(self) -> float:
        return self.scale * _or_inf(math.gamma, 1 + 1 / self.shape)

    @property
    def variance(self) -> float:
        first = _or_inf(math.gamma, 1 + 1 / self.shape)
        second = _or_inf(math.gamma, 1 + 2 / self.shape)
        if math.isinf(second):
            return math.inf
        # beyond a shape of 10^7 it is less than what the difference is exact to
        deviation = self.scale * math.sqrt(max(0.0, second - first * first))
        return deviation * deviation


DISTRIBUTIONS: tuple[type[Distribution], ...] = (
    Constant, Exponential, ShiftedExponential, Uniform, Pareto, LogNormal, Weibull,
)  # fmt: skip


def _times(scale: float, draws: Draws) -> Draws:
    """The product, at most the longest delay: numpy would warn of an overflow."""
    return scale * np.minimum(draws, min(LONGEST_SECS / scale, sys.float_info.max))


def _or_inf(fn: Callable[[float], float], value: float) -> float:
    """The function's value; it may be too large for a float."""
    try:
        return fn(value)
    except OverflowError:
        return math.inf
