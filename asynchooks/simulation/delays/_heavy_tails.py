"""Delays that are mostly short and occasionally very long.

Draws that overflow a float become `LONGEST_SECS`; means and variances are those of the
distributions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from ._arguments import LONGEST_SECS, checked_number, checked_secs_above_zero, checked_shape
from ._light_tails import Delay, Draws, put


def _times(scale: float, draws: Draws) -> Draws:
    """The product, at most the longest delay: numpy would warn of an overflow."""
    return scale * np.minimum(draws, min(LONGEST_SECS / scale, sys.float_info.max))


def _or_inf(fn: Callable[[float], float], value: float) -> float:
    """The function's value; it may be too large for a float."""
    try:
        return fn(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Pareto(Delay):
    """A power law: P(X > x) = (scale / x)^shape for x >= scale.

    Args:
        scale: the shortest delay, in seconds, > 0.
        shape: > 0; up to 1 the mean is infinite, up to 2 the variance is.

    Raises:
        TypeError, ValueError: a parameter is no number, or out of its range.

    Example:
        assert Pareto(1.0, 3.0).mean == 1.5
    """

    scale: float
    shape: float

    def __post_init__(self) -> None:
        scale = checked_secs_above_zero("scale", self.scale)
        put(self, scale=scale, shape=checked_shape("shape", self.shape))

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

    def __str__(self) -> str:
        return f"pareto:{self.scale!r},{self.shape!r}"


@dataclass(frozen=True, slots=True)
class LogNormal(Delay):
    """Its logarithm is normal.

    Args:
        mu: the mean of the logarithm (of seconds).
        sigma: the standard deviation of the logarithm, >= 0.

    Raises:
        TypeError, ValueError: a parameter is no number, or out of its range.

    Example:
        assert LogNormal(0.0, 0.0).mean == 1.0
    """

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        mu, sigma = checked_number("mu", self.mu), checked_number("sigma", self.sigma)
        if sigma < 0:
            raise ValueError(f"sigma is {sigma}; give a finite number >= 0")
        put(self, mu=mu, sigma=sigma)

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

    def __str__(self) -> str:
        return f"lognormal:{self.mu!r},{self.sigma!r}"


@dataclass(frozen=True, slots=True)
class Weibull(Delay):
    """P(X > x) = exp(-(x / scale)^shape): below a shape of 1 heavier than an exponential.

    Args:
        scale: seconds, > 0.
        shape: > 0; 1 gives an exponential.

    Raises:
        TypeError, ValueError: a parameter is no number, or out of its range.

    Example:
        assert Weibull(2.0, 1.0).mean == 2.0
    """

    scale: float
    shape: float

    def __post_init__(self) -> None:
        scale = checked_secs_above_zero("scale", self.scale)
        put(self, scale=scale, shape=checked_shape("shape", self.shape))

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

    def __str__(self) -> str:
        return f"weibull:{self.scale!r},{self.shape!r}"
