"""Delay: a random duration in seconds; a separate one for each worker, and stragglers.

A delay holds parameters only: it draws from the generator that it is given, and has no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ..._check import instance, integer, number

Draws = NDArray[np.float64]

LONGEST_SECS = 1e300
"""Seconds. Longer draws, of heavy tails that overflow a float, count as this long.

Far enough below the largest float for a sum of 10^8 of them.
"""


class Delay(ABC):
    """A duration in seconds, drawn each time.

    The program makes it; there is nothing to close. It never changes, so many workers may share
    one. A parameter that is no number, or out of its range, is a TypeError or ValueError as it is
    made. `parse_delay` reads its text, except for PerWorker, and an Empirical without a file.

    Example:
        secs = Exponential(2.0).sample(np.random.default_rng(seed=1), 3)
        assert secs.shape == (3,)
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

    def for_worker(self, worker: int) -> Delay:
        """The delay that this worker draws from: itself, unless it is or contains a PerWorker."""
        return self


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


@dataclass(frozen=True, slots=True)
class PerWorker(Delay):
    """A delay for each worker: worker i draws from `delays[i]`.

    It has no draws and no mean as a whole: use `for_worker(i)`, as streams do.

    Args:
        delays: at least one.

    Raises:
        TypeError, ValueError: one is no delay, or there are none.

    Example:
        delay = PerWorker([Constant(1.0), Constant(2.0)])
        assert delay.for_worker(1).mean == 2.0
    """

    delays: Sequence[Delay]

    def __post_init__(self) -> None:
        if isinstance(self.delays, str) or not isinstance(self.delays, Sequence):
            raise TypeError(f"delays is {self.delays!r}; give a sequence with one for each worker")
        if not self.delays:
            raise ValueError("delays is empty; give one for each worker")
        delays = tuple(checked_delay(f"delays[{i}]", each) for i, each in enumerate(self.delays))
        put(self, delays=delays)

    def for_worker(self, worker: int) -> Delay:
        """The worker's own.

        Raises:
            ValueError: there are fewer.
        """
        index = integer("worker", worker, least=0)
        if index >= len(self.delays):
            raise ValueError(
                f"there is no delay for worker {index}: PerWorker has {len(self.delays)}; "
                "give one for each worker (they are counted from 0)"
            )
        return self.delays[index].for_worker(index)

    def sample(self, rng: Generator, size: int) -> Draws:
        self._refuse()

    @property
    def mean(self) -> float:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "PerWorker is a delay for each worker and none itself; ask delay.for_worker(0), ..."
        )


@dataclass(frozen=True, slots=True)
class Stragglers(Delay):
    """Some draws of `base` take `factor` times as long.

    Args:
        base: the delay that is drawn.
        probability: of such a draw, 0 to 1.
        factor: >= 1.

    Raises:
        TypeError, ValueError: a parameter is no number or out of its range, or base is no delay.

    Example:
        assert Stragglers(Constant(1.0), 0.1, 11.0).mean == 2.0
    """

    base: Delay
    probability: float
    factor: float

    def __post_init__(self) -> None:
        allowed = "a number from 0 to 1"
        probability = number("probability", self.probability, least=0, most=1, expected=allowed)
        factor = number("factor", self.factor, least=1, expected="a finite number >= 1")
        base = checked_delay("base", self.base)
        put(self, base=base, probability=probability, factor=factor)

    def for_worker(self, worker: int) -> Delay:
        base = self.base.for_worker(worker)
        return self if base is self.base else replace(self, base=base)

    def sample(self, rng: Generator, size: int) -> Draws:
        draws = self.base.sample(rng, size)
        is_slow = rng.random(size) < self.probability
        return np.where(is_slow, self.factor * np.minimum(draws, LONGEST_SECS / self.factor), draws)

    @property
    def mean(self) -> float:
        return self.base.mean * (1 + self.probability * (self.factor - 1))

    def __str__(self) -> str:
        return f"stragglers:{self.probability!r},{self.factor!r},{self.base}"
