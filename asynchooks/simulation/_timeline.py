"""What the workers of a cluster did when: kept if somebody wants to look at it."""

from __future__ import annotations

from typing import NamedTuple

from ..protocols import Pushed


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
    """A gradient that arrived: when, whose, what became of it, and the version after it."""

    worker: int
    time: float
    fate: str
    staleness: int
    version: int


class Timeline:
    """Spans and pushes in order of their ends. The cluster makes one, and writes it."""

    __slots__ = ("pushes", "runs", "spans")

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.pushes: list[Push] = []
        self.runs: list[tuple[int, float, float]] = []
        """(Worker, begin, end) of each run of its program; a crash begins another one."""

    def add(self, worker: int, kind: str, begin: float, end: float) -> None:
        """Take down what a worker has done."""
        self.spans.append(Span(worker, kind, begin, end))

    def pushed(self, worker: int, time: float, pushed: Pushed, version: int) -> None:
        """Take down what has become of a gradient."""
        self.pushes.append(Push(worker, time, pushed.fate.value, pushed.staleness, version))

    def ran(self, worker: int, begin: float, end: float) -> None:
        """Take down that a worker's program ran, and has ended."""
        self.runs.append((worker, begin, end))


class NoTimeline(Timeline):
    """Where nobody wants to look at it."""

    __slots__ = ()

    def add(self, worker: int, kind: str, begin: float, end: float) -> None:
        """Forget it."""

    def pushed(self, worker: int, time: float, pushed: Pushed, version: int) -> None:
        """Forget it."""

    def ran(self, worker: int, begin: float, end: float) -> None:
        """Forget it."""
