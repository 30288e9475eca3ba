"""The smallest clock without a scan is the smallest clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asynchooks.protocols._clocks import Clocks

NUM_WORKERS = 4
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["tick", "tick", "tick", "leave", "join"]), st.integers(0, 3)),
    max_size=60,
)


@given(ACTIONS)
def test_the_slowest_is_the_minimum_of_those_present(actions: list[tuple[str, int]]) -> None:
    clocks, present = Clocks(NUM_WORKERS), set(range(NUM_WORKERS))
    for action, worker in actions:
        before = clocks.slowest
        values = list(clocks.values)
        if action == "tick":
            has_moved = clocks.tick(worker)
            values[worker] += 1
        elif action == "leave":
            has_moved = clocks.leave(worker)
            present.discard(worker)
        elif present:
            clocks.join(worker)
            if worker not in present:
                values[worker] = max(values[worker], before)
            present.add(worker)
            has_moved = False
        else:
            clocks.join(worker)
            present = set(range(NUM_WORKERS))
            values = [max(values)] * NUM_WORKERS
            has_moved = clocks.slowest != before
        assert clocks.values == values
        assert clocks.num_present == len(present)
        assert clocks.left == set(range(NUM_WORKERS)) - present
        if present:
            assert clocks.slowest == min(values[each] for each in present)
        assert has_moved == (clocks.slowest != before)


@given(ACTIONS, st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_clocks_that_were_restored_go_on_as_others_would(
    actions: list[tuple[str, int]], values: list[int]
) -> None:
    clocks = Clocks(NUM_WORKERS)
    clocks.leave(1)
    clocks.restore(values)
    assert clocks.slowest == min(values[each] for each in (0, 2, 3))
    other = Clocks(NUM_WORKERS)
    for worker, value in enumerate(values):
        for _ in range(value):
            other.tick(worker)
    other.leave(1)
    for action, worker in actions:
        getattr(clocks, action)(worker)
        getattr(other, action)(worker)
        if other.num_present:
            assert clocks.slowest == other.slowest


def test_all_begin_side_by_side_after_all_had_left() -> None:
    clocks = Clocks(3)
    clocks.tick(1)
    for worker in range(3):
        clocks.leave(worker)
    clocks.join(0)
    assert (clocks.values, clocks.slowest, clocks.num_present) == ([1, 1, 1], 1, 3)
