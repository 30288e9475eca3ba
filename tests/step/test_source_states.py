"""A source of steps that is live, lost, closed or gone: which waits fail, and what is logged."""

from __future__ import annotations

import logging
import threading
from typing import Any

import anyio
import pytest

from asynchooks import GlobalStep, StepSourceLostError, StepUnreachableError
from asynchooks._step.gate import Answer
from asynchooks.distributed import SourceState
from asynchooks.simulation import Simulation

from ..support.fed_steps import Heard, fed, pause
from ..support.helpers import Box, settle
from ..support.raw_steps import in_line
from .test_global_step import into

pytestmark = pytest.mark.anyio

LIVE, LOST, CLOSED = SourceState.LIVE, SourceState.LOST, SourceState.CLOSED


def test_each_change_of_the_state_is_logged_once_and_a_loss_as_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    step = GlobalStep(multi_process=True, name="steps")
    assert step.statistics().source is None
    step.feed_from(Heard())
    changes = [(LIVE, ""), (LOST, "no answer"), (LOST, "still none"), (LIVE, ""), (CLOSED, "over"),
               (CLOSED, ""), (LIVE, "again")]  # fmt: skip
    for state, reason in changes:
        step.set_source_state(state, reason)
        assert step.statistics().source is state
    step.feed_from(None)
    assert step.statistics().source is None, "which is no news: the last session has closed"
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", "The source of steps is lost: no answer"),
        ("INFO", "The source of steps is live"),
        ("INFO", "The source of steps is closed: over"),
        ("INFO", "The source of steps is live: again"),
    ]


async def test_at_a_loss_waits_fail_that_ask_for_it_and_the_others_go_on() -> None:
    step, _ = fed()
    patient, failed = Box(), Box()

    async def wait_fail(box: Box) -> None:
        try:
            await step.wait_for(5, fails_on_loss=True)
        except StepSourceLostError as error:
            box.error = error

    async with anyio.create_task_group() as group:
        group.start_soon(into, patient, step.wait_for, 5)
        group.start_soon(wait_fail, failed)
        await settle()
        step.set_source_state(LOST)
        await settle()
        assert "no news of other processes arrives while waiting" in str(failed.error)
        assert step.statistics().tasks_waiting_for_step == 1
        with pytest.raises(StepSourceLostError, match="global_step 6"):
            await step.wait_for(6, fails_on_loss=True)
        assert await step.wait_for(0, fails_on_loss=True) == 0
        step.set_source_state(LIVE)
        group.start_soon(wait_fail, failed)
        await settle()
        step.publish(5)
    assert patient.value == 5


async def test_a_closed_source_ends_all_waits_until_it_comes_back() -> None:
    step, _ = fed()
    boxes = [Box(), Box()]
    async with anyio.create_task_group() as group:
        for box in boxes:
            group.start_soon(into, box, step.wait_for, 5)
        await settle()
        await anyio.to_thread.run_sync(step.set_source_state, CLOSED)
    assert [type(each.error) for each in boxes] == [StepUnreachableError] * 2
    with pytest.raises(StepUnreachableError, match="global_step 5 can no longer come"):
        await step.wait_for(5)
    step.set_source_state(LIVE)
    async with anyio.create_task_group() as group:
        group.start_soon(into, boxes[0], step.wait_for, 5)
        await settle()
        step.publish(5)
    assert boxes[0].value == 5


@pytest.mark.parametrize("how", ["none", "another"])
async def test_waits_are_possible_again_when_a_closed_source_has_gone(how: str) -> None:
    step, _ = fed()
    step.set_source_state(CLOSED)
    step.feed_from(None if how == "none" else Heard())
    box = Box()
    async with anyio.create_task_group() as group:
        group.start_soon(into, box, step.wait_for, 5)
        await settle()
        step.publish(5)
    assert box.value == 5


@pytest.mark.parametrize("state", [CLOSED, LIVE, None])
async def test_a_step_that_was_closed_stays_so_whatever_becomes_of_its_source(state: Any) -> None:
    step, _ = fed()
    step.set_source_state(CLOSED)
    step.close()
    step.set_source_state(state)
    with pytest.raises(StepUnreachableError, match="no session is left to move"):
        await step.wait_for(5)


async def test_tickets_that_are_there_are_used_up_after_the_source_has_closed() -> None:
    step, _ = fed(limit=5)
    askers = [in_line(step) for _ in range(3)]
    step.grant(1, epoch=0)
    step.set_source_state(CLOSED)
    assert [each.answer for each in askers] == [Answer.GRANTED, Answer.CUT_OFF, Answer.CUT_OFF]
    assert step.grant(1, epoch=0)
    assert step.admission.take_ticket_nowait() is not None
    with pytest.raises(StepUnreachableError, match=r"no step of .* its source is closed"):
        step.admission.take_ticket_nowait()
    step.set_source_state(LIVE)
    assert step.admission.take_ticket_nowait() is None


async def test_a_wait_for_a_ticket_fails_when_the_source_closes() -> None:
    step, _ = fed(limit=5)
    box = Box()
    async with anyio.create_task_group() as group:
        group.start_soon(into, box, step.admission.take_ticket)
        await settle()
        step.set_source_state(CLOSED)
    assert isinstance(box.error, StepUnreachableError)
    assert "Keep the source open until the sessions have closed" in str(box.error)
    assert step.statistics().tasks_waiting_for_ticket == 0


async def test_a_lost_source_lets_tasks_wait_for_tickets() -> None:
    step, _ = fed(limit=5)
    box = Box()
    async with anyio.create_task_group() as group:
        group.start_soon(into, box, step.admission.take_ticket)
        await settle()
        step.set_source_state(LOST)
        await settle()
        assert step.demand().num_short == 1
        step.set_source_state(LIVE)
        step.grant(1, epoch=0)
    assert box.error is None


async def test_an_exclusive_block_needs_no_source() -> None:
    step, _ = fed(limit=5)
    step.set_source_state(CLOSED)
    async with step.exclusive():
        assert step.statistics().is_exclusive


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_in_virtual_time_they_fail_at_the_moment_of_the_loss(backend: Any) -> None:
    simulation, failed = Simulation(0, backend), []

    async def main() -> None:
        step, _ = fed()

        async def lose() -> None:
            await pause(2.5)
            step.set_source_state(LOST)
            await pause(2.5)
            step.set_source_state(CLOSED)

        simulation.start(lose)
        for fails in (True, False):
            with pytest.raises((StepSourceLostError, StepUnreachableError)) as caught:
                await step.wait_for(9, timeout=60, fails_on_loss=fails)
            failed.append((simulation.now, caught.type))

    simulation.run(main)
    assert failed == [(2.5, StepSourceLostError), (5.0, StepUnreachableError)]


async def test_several_threads_may_set_the_state_at_once() -> None:
    step, _ = fed()
    box = Box()

    def tell() -> None:
        for _ in range(200):
            step.set_source_state(LOST)
            step.set_source_state(LIVE)

    threads = [threading.Thread(target=tell) for _ in range(3)]
    async with anyio.create_task_group() as group:
        group.start_soon(into, box, step.wait_for, 5)
        for each in threads:
            each.start()
        for each in threads:
            await anyio.to_thread.run_sync(each.join)
        assert step.statistics().source is LIVE
        step.publish(5)
    assert box.value == 5


async def test_a_source_that_goes_without_a_loss_ends_no_wait() -> None:
    step, _ = fed()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: step.wait_for(5, fails_on_loss=True))
        await settle()
        step.feed_from(None)
        assert step.statistics().tasks_waiting_for_step == 1
        step.publish(5)
