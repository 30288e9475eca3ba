"""What the workers of a cluster did when: seconds by activity, and the timeline.

No span overlaps another of its worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("compute", "lost", "wait", "pull", "push", "served", "down")
"""What a worker may do: see `Span`."""


class Span(NamedTuple):
    """What a worker did from one moment to another, in virtual seconds.

    `kind` is "compute", "lost" (a discarded computation), "wait" (for others), "pull", "push",
    "served" (in the server's queue, and by it) or "down". It lasted from `begin` to `end`.
    """

    worker: int
    kind: str
    begin: float
    end: float


class Push(NamedTuple):
    """A gradient that arrived at the server.

    Args:
        worker: its number.
        time: when it arrived, in virtual seconds.
        outcome: the value of its `Outcome`, such as "applied".
        staleness: updates between its pull and its push.
        version: the server's, afterwards.
    """

    worker: int
    time: float
    outcome: str
    staleness: int
    version: int


@dataclass(repr=False, eq=False, slots=True)
class Timeline:
    """Spans and pushes in order of their ends, if they are kept. The cluster writes it.

    Args:
        is_kept: whether the cluster keeps them (`keep_timeline`).
    """

    is_kept: bool = True
    spans: list[Span] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.spans)} spans and {len(self.pushes)} pushes>"


class TimeAccount:
    """One worker's seconds, by kind of span (see `Span`). The worker makes it, and writes it.

    No time counts twice: while the worker is down, it counts as down.
    """

    __slots__ = ("_clock", "_down_since", "_downs", "_timeline", "_worker", "secs")

    def __init__(self, worker: int, clock: Callable[[], float], timeline: Timeline) -> None:
        self.secs = dict.fromkeys(KINDS, 0.0)
        self._worker = worker
        self._clock = clock  # it stands still once training is over
        self._timeline = timeline
        self._down_since: float | None = None
        self._downs: list[tuple[float, float]] | None = None  # since its current activity began

    def spend(self, kind: str, begun: float) -> None:
        """Record an activity from `begun`, as the clock gave it, until now."""
        now = self._clock()
        if now <= begun:
            return
        if self._downs is None and self._down_since is None:
            self._add(kind, begun, now)
            return
        downs, self._downs = self._downs or [], None
        if self._down_since is not None:
            downs.append((self._down_since, now))
        for begin, end in [*downs, (now, now)]:
            if begin > begun:
                self._add(kind, begun, begin)
            begun = max(begun, end)

    def go_down(self) -> None:
        """Count the worker as down from now on."""
        if self._down_since is None:
            self._down_since = self._clock()

    def come_up(self) -> None:
        """Count the worker as working again, if it was down."""
        begun, self._down_since = self._down_since, None
        now = self._clock()
        if begun is not None and now > begun:
            self._downs = [*(self._downs or ()), (begun, now)]
            self._add("down", begun, now)

    def _add(self, kind: str, begin: float, end: float) -> None:
        self.secs[kind] += end - begin
        if self._timeline.is_kept:
            self._timeline.spans.append(Span(self._worker, kind, begin, end))
