"""EvaluationHook when an evaluation fails, and when its arguments are wrong."""

from __future__ import annotations

import anyio
import pytest

from asynchooks import (
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    MonitoredSession,
    OnFailure,
    Restart,
)
from asynchooks._engine.base import Engine

from ..support.helpers import counting_creator, settle
from .evaluations import Failing, run_to, stop_when_settled
from .virtual_time import on_trampoline, quarter_step

pytestmark = pytest.mark.anyio


async def test_an_error_in_a_concurrent_evaluation_stops_training_and_leaves_as_itself() -> None:
    error = ValueError("no data")
    failing = Failing(error)
    hook = EvaluationHook(failing, every_n_steps=2)
    with pytest.raises(ValueError, match="no data") as caught:
        async with MonitoredSession([hook], counting_creator()) as session:
            while not session.should_stop():
                await session.run([])
    assert caught.value is error
    assert error.__notes__ == ["in the side task 'eval'"]
    assert str(session.stop_reason) == f"the side task 'eval': {error!r}"
    assert failing.steps == [2], "none at the end of a session that fails"


async def test_an_error_in_an_exclusive_evaluation_leaves_the_run() -> None:
    error = ValueError("no data")
    hook = EvaluationHook(Failing(error), every_n_steps=2, mode=Evaluate.EXCLUSIVE)
    async with MonitoredSession([hook], counting_creator()) as session:
        await session.run([])
        with pytest.raises(ValueError, match="no data") as caught:
            await session.run([])
        assert caught.value is error
        assert error.__notes__ == ["in after_run of EvaluationHook"]
        await run_to(session, 4)
    assert hook.latest_step == 4


async def test_a_logged_error_lets_training_go_on_to_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing(ValueError("no data"))
    hook = EvaluationHook(failing, every_n_steps=2, on_failure=OnFailure.LOG)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 3)
        assert hook.latest is None
        await run_to(session, 5)
    assert failing.steps == [2, 4, 5]
    assert "The side task eval failed; training goes on without it" in caplog.text


def test_a_restarted_evaluation_keeps_its_place_and_sees_the_step_of_then() -> None:
    failing = Failing(ValueError("first"), ValueError("second"))
    restart = Restart(max_attempts=2, first_pause_secs=1.1)
    hook = EvaluationHook(failing, every_n_steps=4, on_failure=restart, at_end=False)

    async def main(engine: Engine) -> None:
        async with MonitoredSession([hook], FunctionSessionCreator(quarter_step)) as session:
            await run_to(session, 8)
            assert failing.steps == [4, 4], "after 1 s of the pause"
            await run_to(session, 9)

    on_trampoline(main)
    assert failing.steps == [4, 4, 8, 9]
    assert hook.latest_step == 9


async def test_when_the_restarts_are_used_up_the_error_stops_training() -> None:
    failing = Failing(*(ValueError(str(n)) for n in range(5)))
    restart = Restart(max_attempts=2, first_pause_secs=0)
    hook = EvaluationHook(failing, every_n_steps=2, on_failure=restart)
    with pytest.raises(ValueError, match="2"):
        async with MonitoredSession([hook], counting_creator()) as session:
            await run_to(session, 2)
    assert failing.steps == [2, 2, 2]


async def test_a_stop_keeps_what_failed_from_restarting_and_the_end_does_not_wait_for_it() -> None:
    failing = Failing(*(ValueError(str(n)) for n in range(5)))
    restart = Restart(first_pause_secs=3600, longest_pause_secs=3600)
    hook = EvaluationHook(failing, every_n_steps=2, on_failure=restart, at_end=False)
    with anyio.fail_after(10):
        async with MonitoredSession([hook], counting_creator()) as session:
            await run_to(session, 3)
            while len(failing.steps) < 2:  # the first restart comes at once
                await settle()
            session.start_soon(stop_when_settled, session)
    assert failing.steps[0] == 2
    assert len(failing.steps) == 2
