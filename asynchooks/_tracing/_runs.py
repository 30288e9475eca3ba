"""Moments of runs: one clock reading between two calls of hooks, and no span until the flush.

A run is a row of times: when each before_run was called, when the step began, when it ended and
the first after_run was called, when each further one was, and when the last had ended. So a call of
a hook costs one reading of the clock (0.1 us), where a span of its own would cost 0.4 us.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._running.hooks import HookCall

MOST_TIMES = 1 << 19
"""Times that wait for a flush: 4 MB. What comes when the disk is stuck pushes out all of them."""


class Done:
    """What can be awaited again and again, and never waits."""

    _nothing: Any = iter(())

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._nothing  # type: ignore[no-any-return]


DONE = Done()


class Cut(NamedTuple):
    """A run that has failed: the times that it came to, and when it was given up."""

    times: list[float]
    ended: float


class RunTimes:
    """The times of the runs of one session, as long as its list of hooks stays as it is.

    The session's task adds times; the thread that flushes takes whole rows. Only what removes
    times takes the lock.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        before: tuple[HookCall, ...],
        after: tuple[HookCall, ...],
        *,
        is_in_run: bool,
    ) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # a run that is thrown away may be cut within it
        self._times = array("d")
        self._cuts: list[Cut] = []  # of failed runs
        self.num_lost = 0
        self.names = [
            *(f"{call.owner}.{call.moment}" for call in before),
            "step",
            *(f"{call.owner}.{call.moment}" for call in after),
        ]
        """Of the spans within a run, each from its time in a row to the next one."""
        self._width = len(self.names) + 1
        if is_in_run:  # whose before_run were called by another list; this row is left out
            self._times.extend([math.nan] * (len(before) + 1))
        self.before_runs = self._around_before(before)
        self.after_runs = self._around_after(after)

    def _around_before(self, calls: tuple[HookCall, ...]) -> tuple[HookCall, ...]:
        last = HookCall(-1, self, "before_run", _pass)
        return tuple(
            call.calling(self._noting(call.fn, is_first=place == 0))
            for place, call in enumerate((*calls, last))
        )

    def _around_after(self, calls: tuple[HookCall, ...]) -> tuple[HookCall, ...]:
        last = HookCall(-1, self, "after_run", _pass)
        return tuple(call.calling(self._noting_after(call.fn)) for call in (*calls, last))

    def _noting(self, method: Callable[..., Any], *, is_first: bool) -> Callable[..., Any]:
        clock, times, width, add = self._clock, self._times, self._width, self._times.append
        begin = self._begin_irregularly

        def first(context: Any) -> Awaitable[Any]:
            num = len(times)
            if num % width or num > MOST_TIMES:
                begin()
            add(clock())
            return method(context)  # type: ignore[no-any-return]

        def later(context: Any) -> Awaitable[Any]:
            add(clock())
            return method(context)  # type: ignore[no-any-return]

        return first if is_first else later

    def _noting_after(self, method: Callable[..., Any]) -> Callable[..., Any]:
        clock, add = self._clock, self._times.append

        def call(context: Any, values: Any) -> Awaitable[Any]:
            add(clock())
            return method(context, values)  # type: ignore[no-any-return]

        return call

    def _begin_irregularly(self) -> None:
        """The run before was cut without notice, or too much waits to be flushed."""
        with self._lock:
            if under_way := len(self._times) % self._width:
                self._cut(under_way, self._clock())
            if len(self._times) > MOST_TIMES:
                self.num_lost += len(self._times) // self._width
                del self._times[:]

    def cut(self) -> None:
        """The run under way has failed; nothing if none is."""
        with self._lock:
            if under_way := len(self._times) % self._width:
                self._cut(under_way, self._clock())

    def _cut(self, under_way: int, ended: float) -> None:
        begun = self._times[-under_way]
        if math.isnan(begun):
            pass
        elif len(self._cuts) * self._width < MOST_TIMES:
            self._cuts.append(Cut(self._times[-under_way:].tolist(), ended))
        else:
            self.num_lost += 1
        del self._times[-under_way:]

    @property
    def last(self) -> float | None:
        """The last time of the run under way; None if none is."""
        return self._times[-1] if len(self._times) % self._width else None

    def take(self) -> tuple[NDArray[np.float64], list[Cut]]:
        """The rows of complete runs, and those that were cut, since the last call."""
        with self._lock:
            num = len(self._times) // self._width
            rows = np.array(self._times[: num * self._width], np.float64)
            del self._times[: num * self._width]
            cuts, self._cuts = self._cuts, []
        rows = rows.reshape(num, self._width)
        return rows[~np.isnan(rows[:, 0])], cuts


def _pass(*_: object) -> Awaitable[Any]:
    return DONE
