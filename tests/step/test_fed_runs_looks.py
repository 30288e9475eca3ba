"""When a source of steps is called: when something new is wanted, and not for every run."""

from __future__ import annotations

import anyio
import pytest

from asynchooks import GlobalStep, StopTraining
from asynchooks._engine.base import Slot

from ..support.fed_steps import Heard, fed
from ..support.helpers import settle
from ..support.raw_steps import in_line
from ..support.virtual_kernel import Trampoline

pytestmark = pytest.mark.anyio


def test_the_source_is_not_called_while_there_are_tickets_enough() -> None:
    step, source = fed(limit=1000)
    step.grant(20, epoch=0)
    calls = []
    for value in range(1, 22):
        ticket = step.admission.take_ticket_nowait()
        calls.append(source.looks())
        if ticket is not None:
            step.admission.settle(ticket, value)
            assert source.looks() == 0
    assert calls == [0] * 9 + [1] * 12  # from the half on


def test_without_a_limit_the_source_is_not_called_by_runs() -> None:
    step, source = fed()
    for value in range(5):
        ticket = step.admission.take_ticket_nowait()
        assert ticket is not None
        step.admission.settle(ticket, value)
    assert source.looks() == 0


def test_nor_is_one_that_does_not_ration() -> None:
    step, source = GlobalStep(multi_process=True), Heard(grants_credits=False)
    step.feed_from(source)
    step.raise_limit(1)
    source.looks()
    ticket = step.admission.take_ticket_nowait()
    assert ticket is not None
    in_line(step)
    step.admission.settle(ticket, None)
    step.admission.abandon(ticket)
    assert source.looks() == 0


def test_at_the_limit_the_source_is_not_called_any_more() -> None:
    step, source = fed(limit=5)
    step.publish(5)
    with pytest.raises(StopTraining, match="has reached its limit"):
        step.admission.take_ticket_nowait()
    assert source.looks() == 0
    step.raise_limit(6)
    assert source.looks() == 1


def test_a_failed_run_has_the_source_called_for_those_in_line() -> None:
    step, source = fed(limit=5)
    step.grant(1, epoch=0)
    ticket = step.admission.take_ticket_nowait()
    assert ticket is not None
    in_line(step)
    source.looks()
    step.admission.settle(ticket, None)
    assert source.looks() == 1


async def test_the_end_of_an_exclusive_block_has_it_called_for_those_it_kept_waiting() -> None:
    step, source = fed(limit=10)
    async with anyio.create_task_group() as group:
        async with step.exclusive():
            step.grant(1, epoch=0)
            for _ in range(2):
                group.start_soon(step.admission.take_ticket)
            await settle()
            source.looks()
        assert (source.looks(), step.demand().num_short) == (1, 1)
        step.grant(1, epoch=0)


async def test_so_does_one_that_gives_up_waiting_for_it() -> None:
    step, source = fed(limit=10)
    step.grant(1, epoch=0)
    step.admission.take_ticket_nowait()
    async with anyio.create_task_group() as group:
        async with anyio.create_task_group() as alone:
            alone.start_soon(step.take_exclusive)
            await settle()
            group.start_soon(step.admission.take_ticket)
            await settle()
            assert step.demand().num_short == 0
            source.looks()
            alone.cancel_scope.cancel()
        assert (source.looks(), step.demand().num_short) == (1, 1)
        step.grant(1, epoch=0)


async def test_the_source_is_called_for_a_step_below_all_others_and_for_no_other() -> None:
    step, source = fed()
    async with anyio.create_task_group() as group:
        for target, num_looks in [(10, 1), (12, 0), (10, 0), (9, 1)]:
            group.start_soon(step.wait_for, target)
            await settle()
            assert source.looks() == num_looks
        step.publish(10)
        await settle()
        assert source.looks() == 0
        group.cancel_scope.cancel()


def test_it_is_called_for_a_limit_that_is_watched_and_for_a_new_epoch_and_a_closed_session() -> (
    None
):
    step, source = GlobalStep(multi_process=True), Heard(grants_credits=False)
    worker = step.open_worker()
    step.feed_from(source)
    slots = [Slot(Trampoline(), "a test") for _ in range(3)]
    step.watch_limit(slots[0])
    source.looks()
    step.raise_limit(7)
    assert source.looks() == 0
    forget = step.watch_limit(slots[1])
    assert (source.looks(), step.demand().next_step) == (1, 7)
    step.watch_limit(slots[2])
    assert source.looks() == 0
    forget()
    step.restart(0)
    assert source.looks() == 1
    step.close_worker(worker)
    assert source.looks() == 1
