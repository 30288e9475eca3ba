"""Delay: a random duration in seconds, and the checks of its parameters.

A delay holds parameters only: it draws from the generator that it is given, and has no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ..._check import instance, number

Draws = NDArray[np.float64]

LONGEST_SECS = 1e300
"""Seconds. Longer draws, of heavy tails that overflow a float, count as this long.

Far enough below the largest float for a sum of 10^8 of them.
"""


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
        """The mean of the distribution, in seconds; `math.inf` where it is infinite."""

    @property
    @abstractmethod
    def variance(self) -> float:
        """The variance, in seconds squared; `math.inf` where it is infinite."""

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
    return instance(name, value, Delay, f"a delay, as in {name}=Exponential(1.0)")


def checked_secs(name: str, value: object) -> float:
    allowed = f"seconds, >= 0 and at most {LONGEST_SECS:g}"
    return number(name, value, least=0.0, most=LONGEST_SECS, expected=allowed)


def checked_secs_above_zero(name: str, value: object, otherwise: str = "") -> float:
    """`otherwise` says what to give instead of a zero."""
    allowed = f"seconds, > 0 and at most {LONGEST_SECS:g}{otherwise}"
    return number(name, value, above=0.0, most=LONGEST_SECS, expected=allowed)
