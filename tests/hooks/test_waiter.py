"""GlobalStepWaiterHook: woken by the step, once, or by an error when it cannot come."""

from __future__ import annotations

import logging
from functools import partial

import anyio
import pytest

from asynchooks import (
    FunctionSessionCreator,
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
    creator = SharedSessionCreator(FunctionSessionCreator(suspending_step))
    started = {}

    async def worker(wait_until: int) -> None:
        hooks = [GlobalStepWaiterHook(wait_until), StopAtStepHook(last_step=100)]
        async with MonitoredSession(hooks, creator) as session:
            await session.run([])
            started[wait_until] = session.global_step.value
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for wait_until in (-5, 0, 30, 60, 90):
            group.start_soon(worker, wait_until)
    assert list(started)[2:] == [30, 60, 90]
    for wait_until in (30, 60, 90):
        assert wait_until < started[wait_until] <= wait_until + 8


async def test_while_all_wait_nothing_runs_and_all_resume_before_the_next_run() -> None:
    log = []

    def step() -> dict[str, int]:
        log.append("run")
        return {}

    notes = Calls(before_run=lambda run_context: log.append("resumed"))
    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async with anyio.create_task_group() as group:
        for _ in range(100):
            hooks = [GlobalStepWaiterHook(1), notes, StopAtStepHook(last_step=300)]
            waits = MonitoredSession(hooks, creator, step_runner="inline")
            group.start_soon(partial(run_and_close, waits, runs=1))
        await settle()
        assert log == []
        await run_session([StopAtStepHook(last_step=300)], creator, runs=2, step_runner="inline")
    assert log[:101] == ["run"] + ["resumed"] * 100


async def test_it_waits_before_the_first_run_only_and_again_after_begin() -> None:
    hook = GlobalStepWaiterHook(3)
    for _ in range(2):
        async with MonitoredSession([hook], counting_creator()) as session:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run, [])
                await settle()
                assert session.global_step.value == 0
                session.global_step.publish(3)
            session.global_step.restart(0)
            await session.run([])


async def test_it_logs_once_and_then_every_thousand_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "asynchooks"):
        hooks = [GlobalStepWaiterHook(2500)]
        async with MonitoredSession(hooks, counting_creator()) as session:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run, [])
                for value in range(100, 2501, 100):
                    await settle()
                    session.global_step.publish(value)
    lines = [r.getMessage() for r in caplog.records if "Waiting for" in r.getMessage()]
    assert lines == [
        "Waiting for global step 2500 before starting training.",
        "Waiting for global step 2500 before starting training. Current step is 1000.",
        "Waiting for global step 2500 before starting training. Current step is 2000.",
    ]


async def test_a_stop_ends_the_wait_cleanly() -> None:
    recording = RecordingHook("a")
    hooks = [GlobalStepWaiterHook(10), recording]
    async with MonitoredSession(hooks, counting_creator()) as session:
        session.start_soon(stop_when_settled, session)
        await session.run([])
        raise AssertionError("not reached")
    assert recording.log[-1] == ("a", "end")


async def test_an_error_in_a_side_task_ends_the_wait_and_leaves() -> None:
    async def fail() -> None:
        await settle()
        raise ValueError("in a side task")

    with pytest.raises(ValueError, match="in a side task"):
        async with MonitoredSession([GlobalStepWaiterHook(10)], counting_creator()) as session:
            session.start_soon(fail)
            await session.run([])


async def test_the_wait_of_a_worker_left_alone_fails_as_its_step_cannot_come() -> None:
    creator = SharedSessionCreator(counting_creator())
    ended = []

    async def waits() -> None:
        with pytest.raises(StepUnreachableError, match="can no longer come"):
            await run_session([GlobalStepWaiterHook(10)], creator, runs=1)
        ended.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(waits)
        await settle()
        async with MonitoredSession([StopAtStepHook(last_step=5)], creator) as session:
            while not session.should_stop():
                await session.run([])
            assert not ended
    assert ended == [True]
