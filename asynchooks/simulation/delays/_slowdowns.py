"""Times in which a worker computes slower, from one moment to another."""

from __future__ import annotations

import math

from ._delays import Delay


class Slowdowns:
    """Factors by span of virtual time; where spans overlap, all of their factors hold."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[tuple[float, float, float]] = []

    def add(self, begin: float, end: float, factor: float) -> None:
        """From `begin` to `end`, in virtual seconds, work takes `factor` times as long."""
        self._spans.append((begin, end, factor))

    def stretch(self, start: float, secs: float, delay: Delay) -> float:
        """How long work of so many seconds takes when it is begun at `start`.

        What the delay has of phases holds besides.
        """
        if secs == 0:
            return 0.0  # it does not wait for the end of a pause
        edges = sorted({edge for begin, end, _ in self._spans for edge in (begin, end)})
        now, left = start, secs
        for edge in edges:
            if edge <= now:
                continue
            factor = self._factor(now)
            if factor < math.inf:
                takes = delay.stretch(now, left * factor)
                if now + takes <= edge:
                    return now + takes - start
                left -= work_done(delay, None, now, edge - now, left * factor) / factor
            now = edge
        return now + delay.stretch(now, left * self._factor(now)) - start

    def _factor(self, time: float) -> float:
        product = 1.0
        for begin, end, factor in self._spans:
            if begin <= time < end:
                product *= factor
        return product


def stretched(delay: Delay, slowdowns: Slowdowns | None, start: float, secs: float) -> float:
    """How long work of so many seconds takes that is begun at `start`."""
    if slowdowns is not None:
        return slowdowns.stretch(start, secs, delay)
    return delay.stretch(start, secs)


def work_done(
    delay: Delay, slowdowns: Slowdowns | None, start: float, elapsed: float, work: float
) -> float:
    """How many seconds of the work are done when so many have passed since its start.

    To within rounding: nobody gives the inverse of `stretch`, so it is searched for.
    """
    if slowdowns is None and not delay.changes_with_time:
        return min(elapsed, work)
    low, high = 0.0, work
    while (middle := (low + high) / 2) not in (low, high):
        if stretched(delay, slowdowns, start, middle) <= elapsed:
            low = middle
        else:
            high = middle
    return low
