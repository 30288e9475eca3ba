"""What a source may do to a step, what it is asked for, and when it is called."""

from __future__ import annotations

import threading

import anyio
import pytest

from asynchooks import GlobalStep, StopTraining
from asynchooks._engine.stop import Stop
from asynchooks._step.gate import Answer
from asynchooks.distributed import Demand, SourceState

from ..support.fed_steps import Heard, fed
from ..support.helpers import settle
from ..support.raw_steps import Raw, in_line, opened, run_here

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stride", [0, -1, 1.5, "2"])
def test_a_stride_that_is_no_number_of_steps_is_refused(stride: int) -> None:
    expected = r"stride is .*; give the steps that a run makes, >= 1"
    with pytest.raises((TypeError, ValueError), match=expected):
        GlobalStep().feed_from(Heard(), stride)


def test_a_new_source_is_live_knows_the_stride_and_is_called() -> None:
    step, source = GlobalStep(multi_process=True), Heard()
    step.feed_from(source, 3)
    assert (step.statistics().source, step.statistics().stride) == (SourceState.LIVE, 3)
    assert source.looks() == 1


def test_the_demand_is_that_of_the_moment() -> None:
    step, _ = fed(limit=10)
    assert step.demand() == Demand(10, 10, 0, 0, 0, 0, 1, 0)
    asker = in_line(step)
    assert step.demand() == Demand(10, 10, 1, 0, 0, 0, 1, 0)
    assert step.grant(3, epoch=0)
    assert asker.answer is Answer.GRANTED
    assert step.demand() == Demand(10, 10, 0, 2, 1, 1, 1, 0)
    ticket = step.admission.take_ticket_nowait()
    assert ticket is not None
    step.admission.settle(ticket, 1)
    assert step.demand() == Demand(10, 10, 0, 1, 1, 2, 1, 0)
    step.restart(7)
    assert step.demand() == Demand(10, 10, 0, 0, 1, 2, 1, 1, num_lost=0), "its run is still out"
    step.publish(10)
    assert step.demand().next_step == float("inf")


async def test_the_lowest_step_that_is_waited_for_comes_before_the_limit() -> None:
    step, _ = fed(limit=10)
    async with anyio.create_task_group() as group:
        group.start_soon(step.wait_for, 4)
        group.start_soon(step.wait_for, 12)
        await settle()
        assert step.demand().next_step == 4
        step.publish(5)
        assert step.demand().next_step == 10
        step.publish(12)
    assert step.demand().next_step == float("inf")


def test_askers_that_wait_for_an_exclusive_block_are_not_short() -> None:
    step, _ = fed(limit=10)
    step.grant(1, epoch=0)
    ticket = step.admission.take_ticket_nowait()
    first, alone, last = in_line(step), in_line(step, is_exclusive=True), in_line(step)
    assert step.demand().num_short == 1
    step.grant(1, epoch=0)
    assert first.ticket is not None
    assert step.demand().num_short == 0
    for each in (ticket, first.ticket):
        assert each is not None
        step.admission.settle(each, None)
    assert (alone.answer, last.answer) == (Answer.GRANTED, Answer.WAIT)
    assert step.demand().num_short == 0


def test_a_run_that_began_before_there_was_a_limit_is_out_and_takes_no_ticket() -> None:
    step, seen = opened(), []
    step.feed_from(Heard())

    def run() -> object:
        step.raise_limit(5)
        step.grant(2, epoch=0)
        seen.append(step.demand().num_out)
        return "a coroutine"

    _, ticket = run_here(step, Raw(run))
    seen.append(step.demand().num_out)
    assert seen == [1, 1]
    step.admission.settle(ticket, 1)
    assert step.demand().num_out == 0
    step = opened()
    step.feed_from(Heard())
    _, ticket = run_here(step, Raw(lambda: step.raise_limit(5)))
    assert (step.demand().num_out, step.demand().num_spare) == (1, 0)
    step.grant(1, epoch=0)
    assert step.demand().num_spare == 1


def test_without_a_limit_steps_run_here_and_below_one_they_take_tickets() -> None:
    step = opened()
    step.feed_from(Heard())
    assert run_here(step, Raw(lambda: ("output", 1))) is not None
    step.raise_limit(1000)
    step.grant(100, epoch=0)
    assert run_here(step, Raw(lambda: ("output", 2))) is None
    assert step.admission.take_ticket_nowait() is not None


@pytest.mark.parametrize("runs", [1, -1])
def test_a_grant_is_void_where_it_does_not_belong(runs: int) -> None:
    step, source = fed(limit=10)
    assert step.grant(2, epoch=0)
    assert not step.grant(runs, epoch=1)
    assert not step.grant(runs, epoch=0, limit=11)
    assert not step.grant(runs, epoch=0, source=Heard())
    assert not step.grant(-3, epoch=0)
    assert step.demand().num_spare == 2
    assert step.grant(runs, epoch=0, limit=10, source=source)
    assert step.grant(runs, epoch=0, limit=9)
    assert step.demand().num_spare == 2 + 2 * runs


def test_what_was_granted_ends_with_its_source_its_epoch_and_its_last_session() -> None:
    step, old = fed(limit=10)
    step.grant(5, epoch=0)
    step.feed_from(Heard())
    assert step.demand().num_spare == 0
    assert not step.grant(5, epoch=0, source=old)
    step.grant(5, epoch=0)
    step.restart(2)
    assert step.demand().num_spare == 0
    step.grant(5, epoch=1)
    step.close_worker(next(iter(step.admission.waiters.workers)))
    assert not step.grant(5, epoch=1)
    step.open_worker()
    step.raise_limit(4)
    assert not step.grant(5, epoch=1, limit=10)
    assert step.demand().num_spare == 0
    assert step.admission.take_ticket_nowait() is None


def test_without_a_source_that_grants_credits_nothing_is_granted() -> None:
    step, source = GlobalStep(), Heard(grants_credits=False)
    step.feed_from(source)
    step.raise_limit(5)
    assert not step.grant(1, epoch=0)
    assert [step.admission.take_ticket_nowait() is None for _ in range(6)] == [False] * 5 + [True]
    assert (step.demand().num_short, step.demand().num_spare) == (0, 0)


def test_askers_in_line_when_the_source_leaves_are_answered_by_the_steps_own_rule() -> None:
    step, _ = fed(limit=2)
    askers = [in_line(step) for _ in range(3)]
    step.feed_from(None)
    assert [each.answer for each in askers] == [Answer.GRANTED, Answer.GRANTED, Answer.WAIT]
    assert step.statistics().source is None


def test_a_step_moved_by_publish_alone_needs_no_credits() -> None:
    step, source = GlobalStep(multi_process=True, published_only=True), Heard()
    step.feed_from(source)
    step.raise_limit(5)
    source.looks()
    assert all(step.admission.take_ticket_nowait() is not None for _ in range(9))
    assert (source.looks(), step.demand().num_spare) == (0, 0)


def test_when_the_last_session_closes_askers_in_line_may_run() -> None:
    step, _ = fed(limit=5)
    asker = in_line(step)
    step.close_worker(next(iter(step.admission.waiters.workers)))
    assert asker.answer is Answer.GRANTED
    assert step.demand().num_out == 1


async def test_a_cancelled_asker_gives_its_ticket_to_the_next() -> None:
    step, source = fed(limit=5)
    async with anyio.create_task_group() as group, anyio.create_task_group() as first:
        first.start_soon(step.admission.take_ticket)
        await settle()
        group.start_soon(step.admission.take_ticket)
        await settle()
        source.looks()
        first.cancel_scope.cancel()
        assert step.grant(1, epoch=0)  # before its task has run
        assert step.demand().num_short == 1
        await settle()
        demand = step.demand()
        assert (demand.num_short, demand.num_spare, demand.num_out) == (0, 0, 1)
    assert source.looks() == 1


@pytest.mark.parametrize("what", ["restart", "feed_from"])
async def test_a_ticket_that_became_void_is_not_given_back(what: str) -> None:
    step, _ = fed(limit=5)
    async with anyio.create_task_group() as group:
        group.start_soon(step.admission.take_ticket)
        await settle()
        group.cancel_scope.cancel()
        step.grant(1, epoch=0)  # before its task has run
        if what == "restart":
            step.restart(0)
        else:
            step.feed_from(Heard())
    demand = step.demand()
    assert (demand.num_spare, demand.num_out, demand.num_short) == (0, 0, 0)


def test_everything_may_come_from_another_thread() -> None:
    step, source = fed(limit=200)
    taken: list[object] = []

    def take() -> None:
        while len(taken) < 200:
            ticket = step.admission.take_ticket_nowait()
            if ticket is not None:
                taken.append(ticket)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for each in threads:
        each.start()
    num_granted = 0
    while num_granted < 201:  # two threads look at the number before they take
        num_granted += step.grant(1, epoch=0)
    for each in threads:
        each.join()
    assert step.demand().num_spare + len(taken) == 201
    assert source.looks() > 0


async def test_a_stop_ends_the_wait_for_tickets() -> None:
    step, _ = fed(limit=10)
    stop, log = Stop(), []
    async with anyio.create_task_group() as group:

        async def take() -> None:
            with pytest.raises(StopTraining, match="a stop was requested while waiting to run"):
                await step.admission.take_ticket(stop)
            log.append("stopped")

        group.start_soon(take)
        await settle()
        stop.set()
    assert log == ["stopped"]
    assert step.statistics().tasks_waiting_for_ticket == 0


def test_a_source_that_was_replaced_changes_nothing_any_more() -> None:
    step, old = fed(limit=10)
    step.set_source_state(SourceState.LOST, source=old)
    assert step.statistics().source is SourceState.LOST
    new = Heard()
    step.feed_from(new, instead_of=old)
    assert step.statistics().source is SourceState.LIVE
    step.set_source_state(SourceState.CLOSED, source=old)
    step.feed_from(None, instead_of=old)
    assert not step.grant(1, epoch=0, source=old)
    assert step.statistics().source is SourceState.LIVE
    assert step.grant(1, epoch=0, source=new)
    step.feed_from(None, instead_of=new)
    assert step.statistics().source is None


def test_lost_runs_are_forgotten_only_in_the_epoch_that_was_looked_at() -> None:
    step, _ = fed(limit=10)
    assert step.grant(1, epoch=0)
    ticket = step.admission.take_ticket_nowait()
    assert ticket is not None
    step.restart(3)
    step.admission.abandon(ticket)
    assert step.demand().num_lost == 1
    step.forget_lost(0)
    assert step.demand().num_out == 1
    step.forget_lost(1)
    assert (step.demand().num_out, step.demand().num_lost) == (0, 0)
