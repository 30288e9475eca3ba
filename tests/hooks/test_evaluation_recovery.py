"""EvaluationHook when the session is lost and recreated, by its own worker or another."""

from __future__ import annotations

import pytest

from asynchooks import (
    EvaluationHook,
    MonitoredSession,
    PreemptionError,
    SharedSessionCreator,
)
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..helpers import settle
from .evaluations import Gated, Notes, run_to

pytestmark = pytest.mark.anyio


async def test_a_recovery_ends_what_is_under_way_and_begins_the_count_anew() -> None:
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
