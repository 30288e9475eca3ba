"""What the workers of a cluster did when: seconds by activity, and the timeline.

`cut_spans` prepares it for drawing: no span overlaps another of its worker.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

Interval = tuple[float, float]


class Span(NamedTuple):
    """What a worker did from one moment to another, in virtual seconds.

    `kind` is "compute", "lost" (a discarded computation), "wait" (for others), "pull", "push",
    "served" (in the server's queue, and by it) or "down". It lasted from `begin` to `end`.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(4, compute=Exponential(1.0), keep_timeline=True)
        report = cluster.run(updates=100)
        assert {span.worker for span in report.timeline.spans} == {0, 1, 2, 3}
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

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(4, compute=Exponential(1.0), keep_timeline=True)
        report = cluster.run(updates=100)
        assert report.timeline.pushes[0].version == 1
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

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        cluster = simulation.cluster(4, compute=Exponential(1.0), keep_timeline=True)
        report = cluster.run(updates=100)
        assert any(span.kind == "compute" for span in report.timeline.spans)
    """

    is_kept: bool = True
    spans: list[Span] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    runs: list[tuple[int, float, float]] = field(default_factory=list)
    """(Worker, begin, end) of each run of its program; a crash begins another one."""
    server: list[tuple[str, float, float]] = field(default_factory=list)
    """("save" or "down", begin, end) of the parameter server."""

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.spans)} spans and {len(self.pushes)} pushes>"


class TimeAccount:
    """One worker's seconds, by kind of span (see `Span`). The worker makes it, and writes it.

    No time counts twice: while the worker is down, it counts as down. "served" counts as "push".
    """

    __slots__ = ("_clock", "_down_since", "_downs", "_timeline", "_worker", "compute", "down",
                 "lost", "pull", "push", "wait")  # fmt: skip

    def __init__(self, worker: int, clock: Callable[[], float], timeline: Timeline) -> None:
        self.compute = self.lost = self.wait = self.pull = self.push = self.down = 0.0
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
        name = "push" if kind == "served" else kind
        setattr(self, name, getattr(self, name) + (end - begin))
        if self._timeline.is_kept:
            self._timeline.spans.append(Span(self._worker, kind, begin, end))


def cut_spans(spans: list[Span]) -> Iterator[Span]:
    """The spans in the same order, without the times at which their worker is down.

    A computation that is not lost by a crash spans the repair, and so may a wait; two failures of
    one worker may overlap.
    """
    down = _down(spans)
    if not down:
        yield from spans
        return
    seen: set[tuple[int, float]] = set()
    for span in spans:
        gaps = down.get(span.worker, [])
        if span.kind == "down":
            begin, end = gaps[bisect_right(gaps, (span.end, span.end)) - 1]
            # once for those that overlap, at the last one: all comes in order of ends
            if span.end == end and (span.worker, begin) not in seen:
                seen.add((span.worker, begin))
                yield Span(span.worker, "down", begin, end)
        else:
            for begin, end in without((span.begin, span.end), gaps):
                yield Span(span.worker, span.kind, begin, end)


def numbers_at_work(timeline: Timeline) -> list[tuple[float, int]]:
    """(Virtual seconds, workers whose program runs and that are not down from then on)."""
    down = _down(timeline.spans)
    changes: Counter[float] = Counter()
    for worker, begin, end in timeline.runs:
        for since, until in without((begin, end), down.get(worker, [])):
            changes[since] += 1
            changes[until] -= 1
    times = sorted(changes)
    return list(zip(times, accumulate(changes[secs] for secs in times), strict=True))


def numbers_at_server(timeline: Timeline) -> list[tuple[float, int]]:
    """(Virtual seconds, pushes that wait for the server or are served from then on)."""
    changes: Counter[float] = Counter()
    for _, kind, begin, end in timeline.spans:
        if kind == "served":
            changes[begin] += 1
            changes[end] -= 1
    times = sorted(changes)
    return list(zip(times, accumulate(changes[secs] for secs in times), strict=True))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, as intervals that neither overlap nor touch, in order."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def without(interval: Interval, gaps: list[Interval]) -> list[Interval]:
    """What is left of an interval, in order; gaps are as `merged` gives them."""
    begin, end = interval
    left = []
    # a worker may crash thousands of times: look only at the gaps that reach the interval
    for place in range(max(0, bisect_right(gaps, (begin, begin)) - 1), len(gaps)):
        gap_begin, gap_end = gaps[place]
        if gap_begin >= end:
            break
        if gap_begin > begin:
            left.append((begin, gap_begin))
        begin = max(begin, gap_end)
    if begin < end:
        left.append((begin, end))
    return left


def _down(spans: list[Span]) -> dict[int, list[Interval]]:
    """When each worker was down."""
    down: dict[int, list[Interval]] = {}
    for worker, kind, begin, end in spans:
        if kind == "down":
            down.setdefault(worker, []).append((begin, end))
    return {worker: merged(each) for worker, each in down.items()}
