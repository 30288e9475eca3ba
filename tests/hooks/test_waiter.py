"""GlobalStepWaiterHook: woken by the step, once, or by an error when it cannot come."""

from __future__ import annotations

import logging
from functools import partial

import anyio
import pytest

from asynchooks import (
    GlobalStepWaiterHook,
    MonitoredSession,
    SharedSessionCreator,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from ..support.helpers import counting_creator, settle
from .evaluations import stop_when_settled
from .training import Calls, run_and_close, run_session, suspending_step

pytestmark = pytest.mark.anyio


async def test_workers_start_at_their_steps_without_polling() -> None:
    creator, started = SharedSessionCreator(suspending_step), dict[int, int]()

    async def work(wait_until: int) -> None:
        hooks = [GlobalStepWaiterHook(wait_until), StopAtStepHook(last_step=100)]
        async with MonitoredSession(hooks, creator) as session:
            await session.run([])
            started[wait_until] = session.global_step.value
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for wait_until in (-5, 0, 30, 90):
            group.start_soon(work, wait_until)
    assert list(started)[2:] == [30, 90]
    assert all(0 < started[each] - each <= 8 for each in (30, 90))


async def test_while_all_wait_nothing_runs_and_all_resume_before_the_next_run() -> None:
    log = []

    def step() -> dict[str, int]:
        log.append("run")
        return {}

    notes = Calls(before_run=lambda run_context: log.append("resumed"))
    creator, limit = SharedSessionCreator(step), StopAtStepHook(last_step=300)
    async with anyio.create_task_group() as group:
        for _ in range(100):
            hooks = [GlobalStepWaiterHook(1), notes, limit]
            waits = MonitoredSession(hooks, creator, step_runner="inline")
            group.start_soon(partial(run_and_close, waits, runs=1))
        await settle()
        assert log == []
        await run_session([limit], creator, runs=2, step_runner="inline")
    assert log[:101] == ["run"] + ["resumed"] * 100


async def test_it_waits_before_the_first_run_of_a_session_only_and_logs_every_thousand_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    hook = GlobalStepWaiterHook(2500)
    for num_sessions in (1, 2):
        async with MonitoredSession([hook], counting_creator()) as session:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run, [])
                for value in range(100, 2501, 100):
                    await settle()
                    assert session.global_step.value == value - 100
                    session.global_step.publish(value)
            session.global_step.restart(0)
            await session.run([])
        waits = [each for each in caplog.messages if "Waiting for global step 2500" in each]
        assert len(waits) == 3 * num_sessions
        assert waits[-1].endswith("Current step is 2000.")


async def test_a_stop_ends_the_wait_cleanly() -> None:
    log = RecordingHook("a")
    async with MonitoredSession([GlobalStepWaiterHook(10), log], counting_creator()) as session:
        session.start_soon(stop_when_settled, session)
        await session.run([])
        raise AssertionError("not reached")
    assert log.log[-1] == ("a", "end")


async def test_the_wait_of_a_worker_left_alone_fails_as_its_step_cannot_come() -> None:
    creator, ended = SharedSessionCreator(counting_creator()), anyio.Event()

    async def waits() -> None:
        with pytest.raises(StepUnreachableError, match="can no longer come"):
            await run_session([GlobalStepWaiterHook(10)], creator, runs=1)
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(waits)
        await settle()
        async with MonitoredSession([StopAtStepHook(last_step=5)], creator) as session:
            while not session.should_stop():
                await session.run([])
            assert not ended.is_set()
    assert ended.is_set()
