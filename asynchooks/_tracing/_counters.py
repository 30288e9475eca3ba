"""Counters of a trace, made at the flush: nothing is counted while training runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._events import nanoseconds
from ._format import Encoder

Points = list[tuple[float, float]]
"""(Seconds, value), in order of time."""

_FIRST_TRACK = 1 << 15
"""Numbers of tracks from here on are counters'."""
_MOST_POINTS = 100
"""Of one counter in one flush."""
_MOST_CHANGES = 200_000
"""Changes of levels that wait for a flush."""
_NUM_BINS = 50
"""Into how many parts a flush divides the steps in virtual time, which passes in leaps."""


class Levels:
    """Numbers that change by one now and then, such as calls under way."""

    def __init__(self) -> None:
        self._changes: list[tuple[str, float, int]] = []
        self._levels: dict[str, int] = {}

    def add(self, name: str, time: float, change: int) -> None:
        self._changes.append((name, time, change))
        if len(self._changes) > _MOST_CHANGES:  # the disk is stuck
            self.take()

    def take(self) -> dict[str, Points]:
        """What they were since the last call."""
        changes, self._changes = self._changes, []
        points: dict[str, Points] = {}
        for name, time, change in changes:
            level = self._levels[name] = self._levels.get(name, 0) + change
            points.setdefault(name, []).append((time, level))
        return points


class Watched:
    """A number that is read at each flush, until it is None."""

    def __init__(self, name: str, read: Callable[[], float | None]) -> None:
        self.name = name
        self.read = read
        self.value = 0.0


class StepCounter:
    """The value of one global step, and how fast it moves; sessions may share it.

    Steps are spread over the ends of the runs that were recorded since the last flush: exactly,
    if nothing else moves the step.
    """

    def __init__(self, step: Any, number: int, now: float) -> None:
        self._step = step
        self.number = number
        """In the names of its counters, where there are several."""
        self._value: float = step.last_known
        self._time = now

    def is_of(self, step: Any) -> bool:
        """Whether it is the same step."""
        return step is not None and bool(self._step.is_same(step))

    def points(
        self, now: float, ends: NDArray[np.float64], *, is_virtual: bool
    ) -> tuple[Points, Points]:
        """Of the step, and of the steps per second; `ends` of runs, in order."""
        before, value = self._value, self._step.last_known
        num = len(ends)
        places = thinned_places(num)
        values = np.rint(before + (value - before) * (places + 1) / max(1, num))
        steps = list(zip(ends[places].tolist(), values.tolist(), strict=True)) or [(now, value)]
        bins = [(self._time, before)]
        if is_virtual:
            bins += steps[:: -(-len(steps) // _NUM_BINS)]
        else:
            bins.append((now, value))
        rates = [
            (later, (after - first) / (later - earlier))
            for (earlier, first), (later, after) in pairwise(bins)
            if later > earlier and after >= first
        ]
        self._value, self._time = value, max(now, self._time)
        return steps, rates


class Counters:
    """The counters' tracks in one file."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tracks: dict[str, int] = {}

    def encoded(self, points: Iterable[Mapping[str, Points]]) -> bytes:
        """The points by name of counter, and the tracks that are new."""
        new: dict[int, str] = {}
        rows: list[tuple[float, float, float]] = []
        for each in points:
            for name, values in each.items():
                track = self._tracks.get(name)
                if track is None:
                    track = self._tracks[name] = _FIRST_TRACK + len(self._tracks)
                    new[track] = name
                some = [values[place] for place in thinned_places(len(values)).tolist()]
                rows += [(track, time, value) for time, value in some]
        table = np.array(rows, np.float64).reshape(len(rows), 3)
        tracks, times = table[:, 0].astype(np.int64), nanoseconds(table[:, 1])
        return self._encoder.counters(new) + self._encoder.points(tracks, times, table[:, 2])


def thinned_places(num: int) -> NDArray[np.int64]:
    """Places of some of so many points, the last one among them."""
    step = max(1, math.ceil(num / _MOST_POINTS))
    return np.arange((num - 1) % step, num, step)
