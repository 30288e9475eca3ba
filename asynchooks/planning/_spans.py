"""Spans: what was recorded of one kind of work, as columns, and the load that it makes.

It knows of no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Spans:
    """Spans of one name, in order of their beginnings, in seconds of the machine's clock.

    Example:
        rollouts = Trace.read("run.pftrace").find("rollout")
        print(rollouts.secs.mean(), rollouts.is_cut.sum())
    """

    begun: Floats
    """float64, shape (n,)."""
    ended: Floats
    """float64, shape (n,). Of a span that was cut: when that was."""
    size: Floats
    """float64, shape (n,): of the input or of the output; NaN if there is none."""
    worker: NDArray[np.int64]
    """int64, shape (n,): whose machine did it; -1 if none was named."""
    track: NDArray[np.int64]
    """int64, shape (n,)."""
    ident: NDArray[np.int64]
    """int64, shape (n,): of what it made, for `Uses`; -1 if it made nothing that is used."""
    is_cut: NDArray[np.bool_]
    """bool, shape (n,): it ended by an error or a cancellation, or had not ended; it is longer."""
    is_on_session: NDArray[np.bool_]
    """bool, shape (n,): the task of a session did it."""

    def __len__(self) -> int:
        return len(self.begun)

    def __repr__(self) -> str:
        mean = f"; mean {float(self.secs.mean()):.3g} s" if len(self) else ""
        num_cut = int(np.count_nonzero(self.is_cut))
        return f"<{len(self)} spans{f', {num_cut} cut' if num_cut else ''}{mean}>"

    @property
    def secs(self) -> Floats:
        """How long each took; at least so long, if it was cut."""
        return self.ended - self.begun

    def pick(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Spans:
        """These of them."""
        return Spans(*(getattr(self, each.name)[which] for each in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[Spans], *, in_order: bool = True) -> Spans:
        """All of these, in order of their beginnings, or as they are given."""
        columns = [np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)]
        every = cls(*columns)
        return every.pick(np.argsort(every.begun, kind="stable")) if in_order else every

    @classmethod
    def none(cls) -> Spans:
        """No spans."""
        return cls.of(np.zeros(0), np.zeros(0))

    @classmethod
    def of(cls, begun: Floats, ended: Floats, **columns: NDArray[Any]) -> Spans:
        """Spans of these columns; what is not given is unknown, or False."""
        given = {"begun": begun, "ended": ended, **columns}
        every = [
            np.asarray(given.get(name, np.full(len(begun), usual)), usual.dtype)
            for name, usual in _USUAL.items()
        ]
        return cls(*every).pick(np.argsort(every[0], kind="stable"))


_UNKNOWN, _NONE, _NO = np.float64(math.nan), np.int64(-1), np.bool_(False)
_USUAL: Mapping[str, np.generic] = {
    "begun": _UNKNOWN, "ended": _UNKNOWN, "size": _UNKNOWN, "worker": _NONE, "track": _NONE,
    "ident": _NONE, "is_cut": _NO, "is_on_session": _NO,
}  # fmt: skip
"""What is in the columns of spans where nothing is known."""


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
        places = np.argsort(order)
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
