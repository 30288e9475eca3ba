"""Times at which work is slower, or stands still: recurring phases, and slowdowns of a worker.

They say how long work takes that begins at a given time; nothing here has a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from numpy.random import Generator

from ..._check import number
from ._delay import LONGEST_SECS, Delay, Draws, checked_delay, checked_secs_above_zero, put

_ALLOWED = "pairs, as in phases=[(60.0, 1.0), (5.0, 2.0)]"


@dataclass(frozen=True, slots=True)
class Phases(Delay):
    """Work of `base`, slower or faster depending on the time; the phases repeat.

    In a phase of factor f work takes f times as long, in a pause (factor `math.inf`) it stands
    still. The first phase begins at virtual time 0. Draws, mean and variance are those of `base`,
    at normal speed: `stretch` gives how long a draw takes. Unlike with `Stragglers`, all work of
    the same time is slow together.

    Args:
        base: the delay that is drawn; without phases of its own.
        phases: (seconds > 0, factor > 0) of each, at least one that is no pause.

    Raises:
        TypeError, ValueError: a parameter is no number or out of its range, or base does not fit.

    Example:
        delay = Phases(Constant(2.0), [(60.0, 1.0), (30.0, math.inf)])
        assert delay.stretch(59.0, 2.0) == 32.0
    """

    base: Delay
    phases: Sequence[tuple[float, float]]
    _ends: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _work: float = field(init=False, repr=False, compare=False)  # of all phases, seconds

    def __post_init__(self) -> None:
        if checked_delay("base", self.base).changes_with_time:
            raise ValueError(
                f"base is {self.base!r}, which has phases already; multiply the factors and give "
                "one Phases"
            )
        phases = _checked_phases(self.phases)
        ends = tuple(accumulate(secs for secs, _ in phases))
        # not by `sum`, which rounds differently since Python 3.12
        *_, work = accumulate(secs / factor for secs, factor in phases)
        if not (0 < work <= LONGEST_SECS and ends[-1] <= LONGEST_SECS):
            raise ValueError(
                f"phases is {phases!r}: {work} seconds of work in {ends[-1]} seconds; give at "
                f"least one phase that is no pause, and at most {LONGEST_SECS:g} seconds"
            )
        put(self, phases=phases, _ends=ends, _work=work)

    def for_worker(self, worker: int) -> Delay:
        base = self.base.for_worker(worker)
        return self if base is self.base else replace(self, base=base)

    def sample(self, rng: Generator, size: int) -> Draws:
        return self.base.sample(rng, size)

    @property
    def mean(self) -> float:
        return self.base.mean

    @property
    def variance(self) -> float:
        return self.base.variance

    @property
    def changes_with_time(self) -> bool:
        return True

    def stretch(self, start: float, secs: float) -> float:
        """How long work of `secs` seconds at normal speed takes, in seconds.

        Work that ends as a pause begins does not wait for its end; work that begins then does.
        """
        if secs == 0:
            return 0.0
        position = start % self._ends[-1]
        first = bisect_right(self._ends, position)
        left = self._ends[first] - position
        factor = self.phases[first][1]
        if secs * factor <= left:
            return secs * factor
        # never below 0: seconds below the rounded quotient are at most the exact one, and fit
        rounds, rest = divmod(secs - left / factor, self._work)
        if rest == 0 and rounds > 0:  # it ends within its last round, before any pause there
            rounds, rest = rounds - 1, self._work
        elapsed = min(left + rounds * self._ends[-1], LONGEST_SECS)
        for length, factor in (*self.phases[first + 1 :], *self.phases[: first + 1]):
            if rest == 0:  # it just fits, up to rounding: the pause that follows does not delay it
                break
            if rest * factor <= length:
                return elapsed + rest * factor
            rest -= length / factor
            elapsed += length
        return elapsed


def _checked_phases(phases: object) -> tuple[tuple[float, float], ...]:
    if isinstance(phases, str) or not isinstance(phases, Sequence):
        raise TypeError(f"phases is {phases!r}; give {_ALLOWED}")
    if not phases:
        raise ValueError(f"phases is empty; give {_ALLOWED}")
    checked = []
    for i, phase in enumerate(phases):
        if not (isinstance(phase, Sequence) and len(phase) == 2) or isinstance(phase, str):
            raise TypeError(f"phases[{i}] is {phase!r}; give a pair (seconds, factor)")
        secs, factor = phase
        length = checked_secs_above_zero(f"the length of phases[{i}]", secs)
        is_pause = isinstance(factor, float) and factor == math.inf
        factor = number(
            f"the factor of phases[{i}]", factor, above=0.0, finite=not is_pause,
            expected="a number > 0, or math.inf for a pause",
        )  # fmt: skip
        checked.append((length, factor))
    return tuple(checked)


Slowdowns = tuple[tuple[float, float, float], ...]
"""(Begin, end, factor), in virtual seconds: work takes so many times as long within the span.

Where spans overlap, all of their factors hold.
"""


def stretched(delay: Delay, slowdowns: Slowdowns, start: float, secs: float) -> float:
    """How long `secs` seconds of work take that begin at `start`, in phases of the delay."""
    if not slowdowns:
        return delay.stretch(start, secs)
    if secs == 0:
        return 0.0  # it does not wait for the end of a pause
    now, left = start, secs
    for edge in sorted({edge for begin, end, _ in slowdowns for edge in (begin, end)}):
        if edge <= now:
            continue
        factor = _factor(slowdowns, now)
        if factor < math.inf:
            takes = delay.stretch(now, left * factor)
            if now + takes <= edge:
                return now + takes - start
            left -= work_done(delay, (), now, edge - now, left * factor) / factor
        now = edge
    return now + delay.stretch(now, left * _factor(slowdowns, now)) - start


def _factor(slowdowns: Slowdowns, time: float) -> float:
    return math.prod(factor for begin, end, factor in slowdowns if begin <= time < end)


def work_done(
    delay: Delay, slowdowns: Slowdowns, start: float, elapsed: float, work: float
) -> float:
    """How many seconds of the work are done when `elapsed` seconds have passed since its start.

    To within rounding: delays have no inverse of `stretch`, so this searches for it.
    """
    if not slowdowns and not delay.changes_with_time:
        return min(elapsed, work)
    low, high = 0.0, work
    while (middle := (low + high) / 2) not in (low, high):
        if stretched(delay, slowdowns, start, middle) <= elapsed:
            low = middle
        else:
            high = middle
    return low
