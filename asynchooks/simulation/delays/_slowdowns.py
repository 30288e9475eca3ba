"""Slowdowns of a worker: spans of virtual time in which it computes more slowly."""

from __future__ import annotations

import math

from ._light_tails import Delay


class Slowdowns:
    """Factors by span of virtual time; where spans overlap, all of their factors hold."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[tuple[float, float, float]] = []

    def add(self, begin: float, end: float, factor: float) -> None:
        """From `begin` to `end`, in virtual seconds, work takes `factor` times as long."""
        self._spans.append((begin, end, factor))

    def stretch(self, start: float, secs: float, delay: Delay) -> float:
        """How long `secs` seconds of work take that begin at `start`.

        Phases of the delay apply as well.
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
    """How long `secs` seconds of work take that begin at `start`."""
    if slowdowns is not None:
        return slowdowns.stretch(start, secs, delay)
    return delay.stretch(start, secs)


def work_done(
    delay: Delay, slowdowns: Slowdowns | None, start: float, elapsed: float, work: float
) -> float:
    """How many seconds of the work are done when `elapsed` seconds have passed since its start.

    To within rounding: delays have no inverse of `stretch`, so this searches for it.
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
