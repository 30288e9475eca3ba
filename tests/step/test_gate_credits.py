"""The gate where runs below the limit need credits, as a state machine."""

from __future__ import annotations

import pytest

from asynchooks._step.gate import Answer, Gate

from .test_gate import asker


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
