"""Where a worker's seconds went: what it did, and when it was down. It waits for nothing."""

from __future__ import annotations

from collections.abc import Callable

from ._timeline import Timeline

SERVED = "served"


class Books:
    """One worker's seconds, by kind of span (see `Span`); the worker makes it, and writes it.

    No moment counts twice: what goes on while the worker is down counts as down. "served" counts
    as "push".

    Args:
        worker: its number.
        clock: the moment that it is, in virtual seconds; it stands still once training is over.
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
        self._downs: list[tuple[float, float]] | None = None  # since it began what it does now

    def book(self, kind: str, begun: float) -> None:
        """It did that since then; ask the clock when it begins."""
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
        """It works no further from now on, if it did."""
        if self._down_since is None:
            self._down_since = self._clock()

    def come_up(self) -> None:
        """It works again, if it was down."""
        begun, self._down_since = self._down_since, None
        now = self._clock()
        if begun is not None and now > begun:
            self._downs = [*(self._downs or ()), (begun, now)]
            self._add("down", begun, now)

    def _add(self, kind: str, begin: float, end: float) -> None:
        account = "push" if kind == SERVED else kind
        setattr(self, account, getattr(self, account) + (end - begin))
        self._timeline.add(self._worker, kind, begin, end)
