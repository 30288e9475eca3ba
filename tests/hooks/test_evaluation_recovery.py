"""EvaluationHook when the session is lost and recreated, by its own worker or another."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import (
    Evaluate,
    EvaluationHook,
    MonitoredSession,
    PreemptionError,
    SessionRunHook,
    SharedSessionCreator,
)
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.helpers import settle
from .evaluations import Gated, Notes, run_to

pytestmark = pytest.mark.anyio


async def test_a_recovery_ends_running_evaluations_and_restarts_the_count() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=4, at_end=False)
    lost = ScriptedSession([{}] * 6 + [PreemptionError("lost")])
    raws = ScriptedSessionCreator([lost, ScriptedSession()])
    async with MonitoredSession([hook], raws, stop_grace_period_secs=0.01) as session:
        await run_to(session, 6)
        await session.run([])
        assert session.global_step.value == 1, "the new session begins at 0"
        for step in (4, 8):
            gated.let(step)
        await run_to(session, 4)
        await gated.wait_for_begun(4)
        await settle()
        await run_to(session, 8)
    assert gated.begun == [4, 4, 8]
    assert gated.ended == [4, 8]


async def test_a_result_after_a_recovery_is_newer_than_one_of_a_later_step_before() -> None:
    hook = EvaluationHook(Notes(), every_n_steps=4, at_end=False)
    lost = ScriptedSession([{}] * 9 + [PreemptionError("lost")])
    async with MonitoredSession(
        [hook], ScriptedSessionCreator([lost, ScriptedSession()])
    ) as session:
        await run_to(session, 9)
        await settle()
        assert hook.latest_step == 8
        await session.run([])
        assert hook.latest_step == 8
        await run_to(session, 4)
        await settle()
        assert hook.latest_step == 4


async def test_a_shared_session_that_others_replace_stays_open_until_the_evaluation_ends() -> None:
    gated = Gated()
    hook = EvaluationHook(gated, every_n_steps=1, at_end=False)
    lost, new = ScriptedSession([{}, PreemptionError("lost")]), ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([lost, new]))
    async with (
        MonitoredSession([hook], creator) as session,
        MonitoredSession([], creator) as other,
    ):
        await session.run([])
        await other.run([])
        assert (lost.is_closed, new.num_runs) == (False, 1)
        gated.let(1)
    assert lost.is_closed


class Loses(SessionRunHook):
    """Loses the session in its first run, and says when there is a new one."""

    def __init__(self) -> None:
        self.may_lose, self.has_new = anyio.Event(), anyio.Event()
        self._num_created = 0

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self._num_created += 1
        if self._num_created == 2:
            self.has_new.set()

    async def before_run(self, run_context: Any) -> None:
        if not self.may_lose.is_set():
            await self.may_lose.wait()
            raise PreemptionError("lost")


class EndsLater(SessionRunHook):
    """At its end another worker loses and replaces the session."""

    def __init__(self, other: Loses) -> None:
        self._other = other

    async def end(self, session: Any) -> None:
        self._other.may_lose.set()
        await self._other.has_new.wait()


@pytest.mark.parametrize("mode", Evaluate)
async def test_the_evaluation_at_the_end_is_of_the_session_that_replaced_a_shared_one(
    mode: Evaluate,
) -> None:
    new = ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([ScriptedSession(), new]))
    evaluated: list[object] = []

    def evaluate(session: object, step: int) -> dict[str, float]:
        evaluated.append(session)
        return {"loss": 0.0}

    loses = Loses()
    evaluation = EvaluationHook(evaluate, every_n_steps=100, mode=mode)
    with anyio.fail_after(10):
        async with MonitoredSession([loses], creator) as other:
            async with anyio.create_task_group() as group:
                group.start_soon(other.run, [])
                async with MonitoredSession([EndsLater(loses), evaluation], creator) as ending:
                    await ending.run([])
    assert evaluated == [new.exposed]
