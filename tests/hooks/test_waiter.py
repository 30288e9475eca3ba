"""GlobalStepWaiterHook: woken by the step, once, or by an error when it cannot come."""

import logging
from functools import partial

import anyio
import pytest

from asynchooks import (
    GlobalStepWaiterHook,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)

from ..support.helpers import counting_creator, in_task, settle
from ..support.moments import at
from .training import run_and_close, run_session


async def test_while_all_wait_nothing_runs_and_all_resume_before_the_next_run() -> None:
    log = []

    def step() -> dict[str, int]:
        log.append("run")
        return {}

    notes = at(before_run=lambda run_context: log.append("resumed"))
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
            async with in_task(session.run, []):
                for value in range(100, 2501, 100):
                    await settle()
                    assert session.global_step.value == value - 100
                    session.global_step.publish(value)
            session.global_step.restart(0)
            await session.run([])
        waits = [each for each in caplog.messages if "Waiting for global step 2500" in each]
        assert len(waits) == 3 * num_sessions
        assert waits[-1].endswith("Current step is 2000.")
