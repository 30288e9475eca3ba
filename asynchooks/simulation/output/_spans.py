"""The spans of a timeline, cut for drawing: in the lane of a worker none overlaps another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from ._timeline import Span, Timeline

Interval = tuple[float, float]


def cut_spans(spans: list[Span]) -> Iterator[Span]:
    """The spans in the same order, without the times at which their worker is down.

    A computation that is not lost by a crash spans the repair, and so may a wait; two failures of
    one worker may overlap.
    """
    down = {worker: merged(each) for worker, each in _down(spans).items()}
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
    down = {worker: merged(each) for worker, each in _down(timeline.spans).items()}
    changes: dict[float, int] = {}
    for worker, begin, end in timeline.runs:
        for since, until in without((begin, end), down.get(worker, [])):
            changes[since] = changes.get(since, 0) + 1
            changes[until] = changes.get(until, 0) - 1
    number, numbers = 0, []
    for secs in sorted(changes):
        number += changes[secs]
        numbers.append((secs, number))
    return numbers


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
    down: dict[int, list[Interval]] = {}
    for worker, kind, begin, end in spans:
        if kind == "down":
            down.setdefault(worker, []).append((begin, end))
    return down
