"""What the workers of a cluster did when: seconds by activity, and the timeline, if it is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...protocols import Pushed

SERVED = "served"


class Span(NamedTuple):
    """What a worker did from one moment to another, in virtual seconds.

    `kind` is "compute", "lost" (computed in vain), "wait" (for others), "pull", "push", "served"
    (in the server's queue, and by it) or "down".
    """

    worker: int
    kind: str
    begin: float
    end: float


class Push(NamedTuple):
    """A gradient that arrived at the server: worker, time, outcome, and the version afterwards."""

    worker: int
    time: float
    outcome: str
    staleness: int
    version: int


class Timeline:
    """Spans and pushes in order of their ends. The cluster makes it, and writes it."""

    __slots__ = ("pushes", "runs", "spans")

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.pushes: list[Push] = []
        self.runs: list[tuple[int, float, float]] = []
        """(Worker, begin, end) of each run of its program; a crash begins another one."""

    def add(self, worker: int, kind: str, begin: float, end: float) -> None:
        """Record what a worker has done."""
        self.spans.append(Span(worker, kind, begin, end))

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.spans)} spans and {len(self.pushes)} pushes>"

    def pushed(self, worker: int, time: float, pushed: Pushed, version: int) -> None:
        """Take down the outcome of a push."""
        self.pushes.append(Push(worker, time, pushed.outcome.value, pushed.staleness, version))

    def ran(self, worker: int, begin: float, end: float) -> None:
        """Record that a worker's program ran, and has ended."""
        self.runs.append((worker, begin, end))


class NoTimeline(Timeline):
    """Where no timeline is kept."""

    __slots__ = ()

    def add(self, worker: int, kind: str, begin: float, end: float) -> None:
        """Do nothing."""

    def pushed(self, worker: int, time: float, pushed: Pushed, version: int) -> None:
        """Do nothing."""

    def ran(self, worker: int, begin: float, end: float) -> None:
        """Do nothing."""


class TimeAccount:
    """One worker's seconds, by kind of span (see `Span`). The worker makes it, and writes it.

    No time counts twice: while the worker is down, it counts as down. "served" counts as "push".

    Args:
        worker: its number.
        clock: the current time, in virtual seconds; it stands still once training is over.
        timeline: of all workers.
    """

    __slots__ = ("_clock", "_down_since", "_downs", "_timeline", "_worker", "compute", "down",
                 "lost", "pull", "push", "wait")  # fmt: skip

    def __init__(self, worker: int, clock: Callable[[], float], timeline: Timeline) -> None:
        self.compute = self.lost = self.wait = self.pull = self.push = self.down = 0.0
        self._worker = worker
        self._clock = clock
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
        name = "push" if kind == SERVED else kind
        setattr(self, name, getattr(self, name) + (end - begin))
        self._timeline.add(self._worker, kind, begin, end)
