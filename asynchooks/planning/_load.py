"""LoadPath: the load of one recording over time, and the work that was done under it."""

from __future__ import annotations

from typing import cast

import numpy as np

from ._spans import Floats, Spans


def shared_speed(num: Floats, slowdown: float) -> Floats:
    """Of each of so many at a shared service, relative to one alone."""
    return 1.0 / (1.0 + slowdown * (np.maximum(num, 1.0) - 1.0))


class LoadPath:
    """The exact load of one recording over time: of all its spans, those that were cut included.

    Args:
        spans: at least one; one that ends before it has begun, as the clock was set, took no time.
    """

    def __init__(self, spans: Spans) -> None:
        begun, num = spans.begun, len(spans)
        ended = np.maximum(spans.ended, begun)
        times = np.concatenate([begun, ended])
        order = np.argsort(times, kind="stable")
        places = np.empty(2 * num, np.int64)
        places[order] = np.arange(2 * num)
        self._begins, self._ends = places[:num], places[num:]
        change = np.where(order < num, 1.0, -1.0)
        # between one time and the next one; it counts for nothing where both are equal
        self._counts = np.cumsum(change)[:-1]
        self._gaps = np.diff(times[order])
        sorted_ends = np.sort(ended)
        # those that begin at one time do so one after the other
        at_begin = np.arange(1, num + 1) - np.searchsorted(sorted_ends, begun, "right")
        self.at_begin: Floats = np.maximum(at_begin, 1).astype(np.float64)
        """float64, shape (n,): how many were under way when each had begun, itself included."""
        before_end = np.searchsorted(begun, ended, "left") - np.searchsorted(sorted_ends, ended)
        self._before_end: Floats = np.maximum(before_end, 1).astype(np.float64)

    def work(self, slowdown: float) -> Floats:
        """Seconds that each would have taken alone, float64, shape (n,)."""
        done = np.zeros(len(self._gaps) + 1)
        np.cumsum(shared_speed(self._counts, slowdown) * self._gaps, out=done[1:])
        return cast(Floats, np.maximum(done[self._ends] - done[self._begins], 0.0))

    def speed_at_end(self, slowdown: float) -> Floats:
        """The speed of each just before its end, float64, shape (n,)."""
        return shared_speed(self._before_end, slowdown)
