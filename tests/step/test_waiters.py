"""Who waits for which step, as a state machine: who is due, and who is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks._engine.base import Slot
from asynchooks._step.source import SourceState
from asynchooks._step.waiters import Waiters, Worker

from .test_gate import NoEngine


def slot() -> Slot:
    return Slot(NoEngine(), "a test")


@pytest.mark.parametrize("num_workers", [None, 2])
def test_a_worker_that_timed_out_may_still_train(num_workers: int | None) -> None:
    waiters = Waiters(num_workers)
    first, second = Worker(), Worker()
    waiters.open(first)
    waiters.open(second)
    timed_out = waiters.add(5, slot(), first)
    timed_out.slot.is_woken = True  # its task has not run yet
    waiters.add(9, slot(), None)
    waiters.close(second)
    assert waiters.take_unreachable() == []
    waiters.leave(timed_out)
    assert waiters.take_unreachable() == []
    waiters.close(first)
    assert len(waiters.take_unreachable()) == 1


def test_no_waiter_is_lost_before_a_worker_has_opened() -> None:
    waiters = Waiters(None)
    waiters.add(5, slot(), None)
    assert waiters.take_unreachable() == []
    worker = Worker()
    waiters.open(worker)
    waiters.add(5, slot(), worker)
    assert waiters.take_unreachable() == []


def test_leaving_twice_or_after_being_taken_changes_nothing() -> None:
    waiters, worker = Waiters(None), Worker()
    waiters.open(worker)
    waiter = waiters.add(5, slot(), worker)
    assert waiters.take_due(5) == [waiter]
    waiters.leave(waiter)
    waiters.leave(waiter)
    assert worker.waits == 0
    assert len(waiters) == 0


@given(st.lists(st.tuples(st.sampled_from("alp"), st.integers(0, 9)), max_size=60))
def test_those_due_come_in_order_and_the_count_is_right(actions: list[tuple[str, int]]) -> None:
    waiters = Waiters(None)
    inside: dict[int, tuple[int, object]] = {}
    for order, (action, number) in enumerate(actions):
        if action == "a":
            inside[order] = (number, waiters.add(number, slot(), None))
        elif action == "l" and inside:
            _, waiter = inside.pop(sorted(inside)[number % len(inside)])
            waiters.leave(waiter)  # type: ignore[arg-type]
        elif action == "p":
            due = sorted((step, key) for key, (step, _) in inside.items() if step <= number)
            assert waiters.take_due(number) == [inside.pop(key)[1] for _, key in due]
        assert len(waiters) == len(inside)


def test_waiters_that_fail_on_loss_are_taken_in_order_and_the_others_stay() -> None:
    waiters, worker = Waiters(None), Worker()
    waiters.open(worker)
    late, patient, early = (waiters.add(step, slot(), worker) for step in (9, 5, 3))
    late.fails_on_loss = early.fails_on_loss = True
    assert waiters.take_failing() == [early, late]
    assert (len(waiters), waiters.next_step, worker.waits) == (1, 5, 1)
    assert waiters.take_failing() == []
    assert waiters.take_due(5) == [patient]


def test_one_that_has_left_is_not_taken() -> None:
    waiters = Waiters(None)
    first, second = waiters.add(1, slot(), None), waiters.add(2, slot(), None)
    waiters.add(3, slot(), None)
    first.fails_on_loss = second.fails_on_loss = True
    waiters.leave(second)
    assert waiters.take_failing() == [first]


def test_all_are_lost_while_the_source_is_closed_and_none_when_it_is_back() -> None:
    waiters = Waiters(None)
    for state in (SourceState.LIVE, SourceState.LOST, None):
        waiters.source_state = state
        waiters.add(1, slot(), None)
        assert waiters.take_unreachable() == []
    waiters.source_state = SourceState.CLOSED
    assert len(waiters.take_unreachable()) == 3
    waiters.source_state = SourceState.LIVE
    waiters.add(1, slot(), None)
    assert waiters.take_unreachable() == []
    waiters.is_closed = True
    assert len(waiters.take_unreachable()) == 1
