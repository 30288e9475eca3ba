"""Delays: random durations in seconds; here the distributions with light tails.

A delay holds parameters only: it draws from the generator that it is given, and has no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ._arguments import checked_secs, checked_secs_above_zero

Draws = NDArray[np.float64]


class Delay(ABC):
    """A duration in seconds, drawn each time.

    The program makes it; there is nothing to close. It never changes, so many workers may share
    one. `parse_delay` reads its text, except for PerWorker, Phases, and an Empirical without a
    file.

    Example:
        streams = Streams(seed=1)
        compute = streams.delays(0, "compute", Exponential(2.0))
        secs = compute.next()
    """

    __slots__ = ()

    @abstractmethod
    def sample(self, rng: Generator, size: int) -> Draws:
        """Draws: float64, shape (size,), in seconds, >= 0 and finite.

        What would be longer than 1e300 seconds counts as 1e300 seconds.

        Args:
            rng: to be used during this call only; a simulation's streams share one.
            size: draws, >= 0.
        """

    @property
    @abstractmethod
    def mean(self) -> float:
        """Of the distribution, in seconds; `math.inf` where it is infinite."""

    @property
    @abstractmethod
    def variance(self) -> float:
        """Of the distribution, in seconds squared; `math.inf` where it is infinite."""

    @property
    def changes_with_time(self) -> bool:
        """Whether `stretch` is more than the identity."""
        return False

    def for_worker(self, worker: int) -> Delay:
        """The delay that this worker draws from: itself, unless it is or contains a PerWorker."""
        return self

    def stretch(self, start: float, secs: float) -> float:
        """How long work of `secs` seconds at normal speed takes, in seconds.

        Args:
            start: when the work begins, in seconds of virtual time, >= 0.
            secs: seconds, >= 0.
        """
        return secs


def put(delay: Delay, **values: object) -> None:
    """Set fields of a frozen delay, while it is made."""
    for name, value in values.items():
        object.__setattr__(delay, name, value)


def checked_delay(name: str, value: object) -> Delay:
    if not isinstance(value, Delay):
        raise TypeError(f"{name} is {value!r}; give a delay, as in {name}=Exponential(1.0)")
    return value


@dataclass(frozen=True, slots=True)
class Constant(Delay):
    """Always the same duration.

    Args:
        secs: seconds, >= 0.

    Raises:
        TypeError, ValueError: the parameter is no number, or out of its range.

    Example:
        assert Constant(2.0).mean == 2.0
    """

    secs: float

    def __post_init__(self) -> None:
        put(self, secs=checked_secs("secs", self.secs))

    def sample(self, rng: Generator, size: int) -> Draws:
        return np.full(size, self.secs)

    @property
    def mean(self) -> float:
        return self.secs

    @property
    def variance(self) -> float:
        return 0.0

    def __str__(self) -> str:
        return f"constant:{self.secs!r}"


@dataclass(frozen=True, slots=True)
class Exponential(Delay):
    """Memoryless: P(X > x) = exp(-x / mean).

    Args:
        mean: seconds, > 0.

    Raises:
        TypeError, ValueError: the parameter is no number, or out of its range.

    Example:
        assert str(Exponential(2.0)) == "exponential:2.0"
    """

    mean: float = field()  # without it, the property of the base would be its default

    def __post_init__(self) -> None:
        mean = checked_secs_above_zero("mean", self.mean, ", or Constant(0) for no delay")
        put(self, mean=mean)

    def sample(self, rng: Generator, size: int) -> Draws:
        return rng.exponential(self.mean, size)

    @property
    def variance(self) -> float:
        return self.mean * self.mean

    def __str__(self) -> str:
        return f"exponential:{self.mean!r}"


@dataclass(frozen=True, slots=True)
class ShiftedExponential(Delay):
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

    shift: float
    excess: float

    def __post_init__(self) -> None:
        excess = checked_secs_above_zero("excess", self.excess, ", or Constant(shift) for none")
        put(self, shift=checked_secs("shift", self.shift), excess=excess)

    def sample(self, rng: Generator, size: int) -> Draws:
        return self.shift + rng.exponential(self.excess, size)

    @property
    def mean(self) -> float:
        return self.shift + self.excess

    @property
    def variance(self) -> float:
        return self.excess * self.excess

    def __str__(self) -> str:
        return f"shifted-exponential:{self.shift!r},{self.excess!r}"


@dataclass(frozen=True, slots=True)
class Uniform(Delay):
    """Uniform from `low` to `high`.

    Args:
        low: seconds, >= 0.
        high: seconds, >= low.

    Raises:
        TypeError, ValueError: a parameter is no number, or out of its range.

    Example:
        assert Uniform(1.0, 3.0).mean == 2.0
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        low, high = checked_secs("low", self.low), checked_secs("high", self.high)
        if high < low:
            raise ValueError(f"low is {low} and high is {high}; give low <= high")
        put(self, low=low, high=high)

    def sample(self, rng: Generator, size: int) -> Draws:
        return rng.uniform(self.low, self.high, size)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def variance(self) -> float:
        return (self.high - self.low) * (self.high - self.low) / 12

    def __str__(self) -> str:
        return f"uniform:{self.low!r},{self.high!r}"
