"""EvaluationHook when the session ends, fails or is cancelled."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

from asynchooks import (
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)

from ..support.helpers import counting_creator, counting_step, settle
from .evaluations import Failing, Gated, Notes, run_to, stop_when_settled
from .virtual_time import Writer

pytestmark = pytest.mark.anyio
both_modes = pytest.mark.parametrize("mode", list(Evaluate))


@pytest.mark.parametrize("last_step", [5, 6])
async def test_the_end_waits_for_what_is_under_way_then_evaluates_the_last_step_once(
    last_step: int,
) -> None:
    gated = Gated()
    writer = Writer()
    hook = EvaluationHook(gated, every_n_steps=3, summary_writer=writer)
    gated.let(5)
    async with MonitoredSession(
        [hook, StopAtStepHook(last_step=last_step)], counting_creator()
    ) as session:
        await run_to(session, 3)
        while not session.should_stop():
            await session.run([])
        session.start_soon(gated.let_when_begun, last_step)
        session.start_soon(gated.let_when_begun, 3)
    assert gated.ended == [3, last_step]
    assert [step for _, _, step in writer.written] == [3, last_step]


@both_modes
async def test_hooks_that_are_listed_later_find_the_last_result_at_their_end(
    mode: Evaluate,
) -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=100, mode=mode)
    seen = []

    class Later(SessionRunHook):
        async def end(self, session: Any) -> None:
            seen.append(hook.latest_step)

    async with MonitoredSession([hook, Later()], counting_creator()) as session:
        await run_to(session, 2)
        session.start_soon(gated.let_when_begun, 2)
    assert seen == [2]


@both_modes
async def test_a_result_of_that_step_of_an_earlier_session_does_not_stand_for_this_one(
    mode: Evaluate,
) -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=4, mode=mode)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 4)
    creator = FunctionSessionCreator(counting_step()[0], initial_step=2)
    async with MonitoredSession([hook], creator) as session:
        await run_to(session, 4)
    assert notes.steps == [4, 4]


@both_modes
async def test_without_at_end_nothing_is_evaluated_there(mode: Evaluate) -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=3, mode=mode, at_end=False)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 4)
    assert notes.steps == [3]


@both_modes
async def test_after_an_error_in_the_block_nothing_is_evaluated(mode: Evaluate) -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=3, mode=mode)
    with pytest.raises(ValueError, match="in the block"):
        async with MonitoredSession([hook], counting_creator()) as session:
            await run_to(session, 4)
            raise ValueError("in the block")
    assert notes.steps == [3]


@pytest.mark.parametrize("where", ["another worker", "a side task"])
async def test_after_an_error_elsewhere_nothing_is_evaluated_at_the_end(where: str) -> None:
    notes = Notes()
    hook = EvaluationHook(notes, every_n_steps=3)
    creator = SharedSessionCreator(counting_creator())

    async def fail() -> None:
        raise OSError("elsewhere")

    async def other() -> None:
        async with MonitoredSession([], creator):
            await fail()

    async def main() -> None:
        async with MonitoredSession([hook], creator) as session:
            await run_to(session, 4)
            if where == "a side task":
                session.start_soon(fail)
                await settle()
            else:
                with pytest.raises(OSError, match="elsewhere"):
                    await other()
            assert session.should_stop()

    if where == "a side task":
        with pytest.raises(OSError, match="elsewhere"):
            await main()
    else:
        await main()
    assert notes.steps == [3]


async def test_after_an_evaluation_that_fails_when_training_has_stopped_there_is_no_other() -> None:
    failing = Failing(ValueError("too late"))
    may_fail = anyio.Event()

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await may_fail.wait()
        return await failing(session, step)

    hook = EvaluationHook(evaluate, every_n_steps=2)
    with pytest.raises(ValueError, match="too late"):
        async with MonitoredSession([hook], counting_creator()) as session:
            await run_to(session, 3)
            session.request_stop("enough")
            may_fail.set()
    assert failing.steps == [2]


@both_modes
async def test_an_error_of_the_evaluation_at_the_end_leaves_the_block(mode: Evaluate) -> None:
    writer = Writer()
    failing = Failing(ValueError("at the end"))
    hook = EvaluationHook(failing, every_n_steps=100, mode=mode, summary_writer=writer)
    with pytest.raises(ValueError, match="at the end"):
        async with MonitoredSession([hook], counting_creator()) as session:
            await run_to(session, 2)
    assert failing.steps == [2]
    assert writer.flushes >= 1


@both_modes
async def test_one_that_waits_when_training_is_stopped_counts_as_not_finished(
    mode: Evaluate, caplog: pytest.LogCaptureFixture
) -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        if step == 2:
            await session_of_run.global_step.wait_for(10**9)
        return {"step": step}

    hook = EvaluationHook(evaluate, every_n_steps=2, mode=mode, at_end=False)
    with caplog.at_level(logging.INFO, "asynchooks"):
        async with MonitoredSession([hook], counting_creator()) as session:
            session_of_run = session
            await session.run([])
            session.start_soon(stop_when_settled, session)
            await session.run([])
            while not session.should_stop():
                await settle()
    assert hook.latest is None
    assert "eval at step 2 was not finished: a stop was requested while waiting" in caplog.text


async def test_a_stop_leaves_an_evaluation_that_does_not_wait_through_asynchooks_alone() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=2)
    async with MonitoredSession([hook], counting_creator()) as session:
        await run_to(session, 2)
        session.request_stop("enough")
        session.start_soon(gated.let_when_begun, 2)
    assert gated.ended == [2]
    assert hook.latest_step == 2


@both_modes
async def test_a_cancellation_ends_the_evaluation_and_flushes(mode: Evaluate) -> None:
    gated, writer = Gated(), Writer()
    hook = EvaluationHook(gated, every_n_steps=2, mode=mode, summary_writer=writer)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:

            async def train() -> None:
                async with MonitoredSession([hook], counting_creator()) as session:
                    await run_to(session, 2)
                    await anyio.sleep_forever()

            group.start_soon(train)
            await gated.wait_for_begun(2)
            await settle()
            group.cancel_scope.cancel()
    assert (gated.begun, gated.ended) == ([2], [])
    assert writer.flushes == 1
