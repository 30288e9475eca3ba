"""What a worker does while it is down is cut, and the workers at work are counted."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from asynchooks.simulation.output._timeline import (
    Span,
    Timeline,
    cut_spans,
    merged,
    numbers_at_work,
    without,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(
        lambda pair: (float(pair[0]), float(pair[0] + pair[1]))
    ),
    max_size=8,
)


def inside(point: float, intervals: list[tuple[float, float]]) -> bool:
    return any(begin <= point < end for begin, end in intervals)


@given(INTERVALS)
def test_a_union_holds_the_same_points_without_overlap(
    intervals: list[tuple[float, float]],
) -> None:
    union = merged(intervals)
    assert all(first[1] < second[0] for first, second in pairwise(union))
    for point in range(40):
        assert inside(point + 0.5, union) == inside(point + 0.5, intervals)


@given(INTERVALS, st.integers(0, 20), st.integers(0, 20))
def test_what_is_left_of_an_interval_is_what_no_gap_holds(
    gaps: list[tuple[float, float]], begin: int, secs: int
) -> None:
    left = without((begin, begin + secs), merged(gaps))
    for point in range(45):
        middle = point + 0.5
        expected = begin <= middle < begin + secs and not inside(middle, gaps)
        assert inside(middle, left) == expected


def test_a_computation_that_outlasts_a_repair_is_two_spans() -> None:
    spans = [Span(0, "down", 3, 5), Span(1, "compute", 0, 6), Span(0, "compute", 0, 10)]
    assert list(cut_spans(spans)) == [
        Span(0, "down", 3, 5),
        Span(1, "compute", 0, 6),
        Span(0, "compute", 0, 3),
        Span(0, "compute", 5, 10),
    ]


def test_a_wait_that_ends_while_its_worker_is_down_ends_when_that_begins() -> None:
    spans = [Span(0, "wait", 2, 4), Span(0, "down", 3, 5)]
    assert list(cut_spans(spans)) == [Span(0, "wait", 2, 3), Span(0, "down", 3, 5)]


def test_failures_that_overlap_are_one_span() -> None:
    spans = [Span(0, "down", 3, 5), Span(0, "down", 4, 7), Span(0, "down", 2, 7)]
    assert list(cut_spans(spans)) == [Span(0, "down", 2, 7)]


def test_a_worker_that_is_down_is_not_at_work() -> None:
    timeline = Timeline()
    timeline.add(0, "down", 3, 5)
    timeline.ran(0, 0, 10)  # it was paused, its program went on
    timeline.add(1, "down", 4, 8)
    timeline.ran(1, 0, 4)
    timeline.ran(1, 8, 9)
    assert numbers_at_work(timeline) == [(0, 2), (3, 1), (4, 0), (5, 1), (8, 2), (9, 1), (10, 0)]
