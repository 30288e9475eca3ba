"""The gate as a state machine, driven without tasks: exact stops, fairness, epochs, credits."""

from __future__ import annotations

import math

import pytest

from asynchooks._engine.base import Slot
from asynchooks._engine.current import system_now
from asynchooks._step.gate import Answer, Asker, Gate


def asker(*, is_exclusive: bool = False) -> Asker:
    # the gate uses no engine
    return Asker(Slot(None, "a test"), is_exclusive)  # type: ignore[arg-type]


def test_the_first_run_under_a_limit_is_alone_until_the_stride_is_known() -> None:
    gate = Gate(0)
    gate.limit = 100
    first = gate.grant()
    assert gate.decide(is_exclusive=False) is Answer.WAIT
    gate.settle(first, 2)
    assert gate.stride == 2
    gate.grant()
    assert gate.decide(is_exclusive=False) is Answer.GRANTED


def test_a_run_that_does_not_move_the_step_teaches_no_stride() -> None:
    gate = Gate(0)
    gate.limit = 10
    gate.settle(gate.grant(), 0)
    assert gate.stride is None


def test_a_run_during_another_teaches_no_stride() -> None:
    gate = Gate(0)
    first, second = gate.grant(), gate.grant()
    gate.settle(first, 2)
    gate.settle(second, 2)
    assert gate.stride is None


def test_without_a_limit_every_asker_is_granted() -> None:
    gate = Gate(0)
    for _ in range(5):
        assert gate.decide(is_exclusive=False) is Answer.GRANTED
        gate.grant()


def test_exclusive_waits_for_runs_and_holds_later_askers_back() -> None:
    gate = Gate(0)
    ticket = gate.grant()
    writer, reader = asker(is_exclusive=True), asker()
    gate.askers.extend([writer, reader])
    assert gate.answer_askers() == []
    gate.settle(ticket, 1)
    assert gate.answer_askers() == [writer]
    assert gate.is_exclusive
    assert reader.answer is Answer.WAIT
    gate.is_exclusive = False
    assert gate.answer_askers() == [reader]
    assert reader.ticket is not None


def test_a_ticket_of_an_older_epoch_settles_nothing() -> None:
    gate = Gate(0)
    old = gate.grant()
    gate.restart(5)
    assert (gate.epoch, gate.value, gate.tickets) == (1, 5, 0)
    gate.settle(old, 99)
    assert (gate.value, gate.tickets) == (5, 0)


def test_runs_of_older_epochs_are_reckoned_with_until_they_end() -> None:
    gate = Gate(0)
    first, second = gate.grant(), gate.grant()
    gate.restart(0)
    third = gate.grant()
    assert (gate.tickets, gate.num_void) == (1, 2)
    gate.settle(first, 7)
    assert gate.num_void == 1
    gate.restart(0)
    assert (gate.tickets, gate.num_void) == (0, 2)
    gate.forget_lost()
    assert gate.num_void == 2, "they are waited for: they will end"
    gate.settle(second, None)
    gate.settle(third, None)
    assert gate.num_void == 0


def test_lost_runs_of_older_epochs_can_be_forgotten() -> None:
    gate = Gate(0)
    before, after, waited_for, late = (gate.grant() for _ in range(4))
    gate.abandon(before)
    gate.restart(0)
    gate.abandon(after)
    gate.abandon(after)
    assert (gate.num_void, gate.num_lost, gate.abandoned) == (4, 2, 0)
    gate.forget_lost()
    assert (gate.num_void, gate.num_lost) == (2, 0)
    gate.abandon(late)
    assert (gate.num_void, gate.num_lost) == (2, 1)
    for each in (before, after, late, waited_for):  # they end all the same
        gate.settle(each, 3)
    assert (gate.num_void, gate.num_lost, gate.value) == (0, 0, 0)


def test_a_run_that_was_lost_before_its_epoch_ended_is_forgotten_afterwards_alone() -> None:
    gate = Gate(0)
    lost = gate.grant()
    gate.abandon(lost)
    gate.forget_lost()
    assert (gate.tickets, gate.abandoned) == (1, 1)
    gate.restart(0)
    assert (gate.num_void, gate.num_lost) == (1, 1)
    gate.settle(lost, None)
    assert (gate.num_void, gate.num_lost) == (0, 0)


def test_what_was_granted_is_used_while_it_is_leased() -> None:
    gate = Gate(0)
    gate.limit, gate.needs_credits = 10, True
    gate.add_credits(2)
    assert gate.decide(is_exclusive=False) is Answer.GRANTED
    gate.lease_until = system_now()
    assert gate.decide(is_exclusive=False) is Answer.WAIT
    gate.lease_until = math.inf
    assert gate.decide(is_exclusive=False) is Answer.GRANTED


def test_a_ticket_settles_once() -> None:
    gate = Gate(0)
    ticket, _ = gate.grant(), gate.grant()
    gate.settle(ticket, 1)
    gate.settle(ticket, 7)
    assert (gate.value, gate.tickets) == (1, 1)


@pytest.mark.parametrize(("value", "answer"), [(9, Answer.GRANTED), (10, Answer.REFUSED)])
def test_at_the_limit_runs_are_refused(value: int, answer: Answer) -> None:
    gate = Gate(value)
    gate.limit = 10
    assert gate.decide(is_exclusive=False) is answer


def gate_that_keeps_its_limit(value: int) -> Gate:
    gate = Gate(value)
    gate.limit, gate.published_only = 10, True
    return gate


def test_where_no_run_goes_beyond_the_limit_all_are_granted_up_to_it() -> None:
    gate = gate_that_keeps_its_limit(9)
    assert gate.stride is None
    for _ in range(5):
        assert gate.decide(is_exclusive=False) is Answer.GRANTED
        assert gate.is_far_from_limit()
        gate.grant()
    gate.learn(10)
    assert gate.decide(is_exclusive=False) is Answer.REFUSED
    assert not gate.is_far_from_limit()


def test_without_a_limit_a_gate_that_would_keep_it_is_not_far_from_it() -> None:
    gate = gate_that_keeps_its_limit(9)
    gate.limit = None
    assert not gate.is_far_from_limit()
    assert gate.decide(is_exclusive=False) is Answer.GRANTED


def test_where_no_run_goes_beyond_the_limit_what_others_publish_teaches_no_stride() -> None:
    gate = gate_that_keeps_its_limit(0)
    ticket = gate.grant()
    gate.learn(6)
    gate.settle(ticket, 6)
    assert gate.stride is None
    assert gate.is_far_from_limit()


def test_a_gate_that_keeps_its_limit_still_has_an_exclusive_side() -> None:
    gate = gate_that_keeps_its_limit(0)
    gate.grant()
    assert gate.decide(is_exclusive=True) is Answer.WAIT
    gate.is_exclusive = True
    assert gate.decide(is_exclusive=False) is Answer.WAIT


def with_credits(value: int = 0, *, granted: int = 0, stride: int = 1) -> Gate:
    gate = Gate(value)
    gate.limit, gate.needs_credits, gate.stride = 10, True, stride
    gate.add_credits(granted)
    return gate


def test_below_the_limit_each_run_takes_a_credit() -> None:
    gate = with_credits(granted=2)
    for _ in range(2):
        assert gate.decide(is_exclusive=False) is Answer.GRANTED
        gate.grant()
    assert gate.decide(is_exclusive=False) is Answer.WAIT
    assert gate.credits == 0
    gate.learn(10)
    assert gate.decide(is_exclusive=False) is Answer.REFUSED


def test_a_gate_that_needs_credits_is_never_far_from_its_limit() -> None:
    assert not with_credits(granted=9).is_far_from_limit()


def test_it_is_short_from_half_of_the_credits_and_not_at_the_limit_nor_without_one() -> None:
    gate = with_credits(granted=5)
    seen = []
    for _ in range(5):
        gate.grant()
        seen.append(gate.is_short)
    assert seen == [False, False, True, True, True]
    gate.learn(10)
    assert not gate.is_short
    gate = with_credits()
    assert gate.is_short
    gate.limit = None
    assert not gate.is_short


def test_what_a_ticket_took_is_given_back_once_and_not_after_it_became_void() -> None:
    gate = with_credits(granted=2)
    first, second = gate.grant(), gate.grant()
    gate.take_back(first)
    assert (gate.credits, gate.tickets) == (1, 1)
    gate.void_credits()
    gate.take_back(second)
    assert (gate.credits, gate.low_water, gate.tickets) == (0, 0, 0)


@pytest.mark.parametrize("limit", [None, 10])
def test_a_ticket_that_took_no_credit_gives_none_back(limit: int | None) -> None:
    gate = with_credits()
    gate.limit = limit
    ticket = gate.grant()
    gate.limit = 10
    gate.add_credits(1)
    gate.take_back(ticket)
    assert gate.credits == 1


def test_a_restart_voids_the_credits() -> None:
    gate = with_credits(granted=3)
    ticket = gate.grant()
    gate.restart(4)
    gate.take_back(ticket)
    assert (gate.credits, gate.tickets) == (0, 0)


@pytest.mark.parametrize(
    ("value", "abandoned", "answer"),
    [(7, 1, Answer.WAIT), (8, 1, Answer.REFUSED), (6, 2, Answer.REFUSED), (9, 0, Answer.WAIT)],
)
def test_abandoned_runs_that_could_bring_the_limit_are_not_waited_for(
    value: int, abandoned: int, answer: Answer
) -> None:
    gate = with_credits(value, granted=abandoned, stride=2)
    for _ in range(abandoned):
        gate.abandon(gate.grant())
    assert gate.decide(is_exclusive=False) is answer


def test_one_run_that_goes_on_is_waited_for() -> None:
    gate = with_credits(8, granted=2)
    gate.abandon(gate.grant())
    gate.grant()
    assert gate.decide(is_exclusive=False) is Answer.WAIT


def test_an_asker_is_cut_off_when_the_credits_are_used_up() -> None:
    gate = with_credits(granted=1)
    gate.is_cut_off = True
    waiting = [asker(), asker(is_exclusive=True), asker()]
    gate.askers.extend(waiting)
    assert gate.answer_askers() == waiting[:1]
    assert waiting[0].ticket is not None
    gate.settle(waiting[0].ticket, 1)
    gate.answer_askers()
    gate.is_exclusive = False
    assert gate.answer_askers() == waiting[2:]
    assert waiting[2].answer is Answer.CUT_OFF
