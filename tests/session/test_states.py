"""What a session says of itself while its raw session comes, is lost, and comes back."""

from __future__ import annotations

import pytest

from asynchooks import MonitoredSession, PreemptionError, Recovery, SessionRunHook, StopTraining
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

pytestmark = pytest.mark.anyio

NOW = Recovery(max_attempts=1, first_pause_secs=0)


def lost() -> ScriptedSession:
    return ScriptedSession([PreemptionError("the machine went away")])


async def test_a_raw_session_that_is_lost_too_often_stops_training_until_a_run_tries_again() -> (
    None
):
    creator = ScriptedSessionCreator([lost(), lost(), ScriptedSession([{}, {}])])
    async with MonitoredSession([], creator, recovery=NOW) as session:
        with pytest.raises(PreemptionError, match="went away"):
            await session.run([])
        assert session.should_stop()
        assert session.status().phase == "open"
        await session.run([])
        assert not session.should_stop()
        assert session.global_step.value == 1


async def test_an_error_while_a_lost_one_is_recreated_leaves_the_run() -> None:
    creator = ScriptedSessionCreator([lost(), ValueError("a bug"), ScriptedSession([{}])])
    async with MonitoredSession([], creator) as session:
        with pytest.raises(ValueError, match="a bug"):
            await session.run([])
        assert session.should_stop()
        await session.run([])
    with pytest.raises(RuntimeError, match="after the session was closed"):
        await session.run([])


async def test_a_caught_end_of_training_leaves_the_session_usable() -> None:
    class Ends(SessionRunHook):
        has_ended = False

        async def before_run(self, run_context: object) -> None:
            if not self.has_ended:
                self.has_ended = True
                raise StopAsyncIteration

    async with MonitoredSession(
        [Ends()], ScriptedSessionCreator([ScriptedSession([{}])])
    ) as session:
        with pytest.raises(StopTraining, match="the input ended in before_run of Ends"):
            await session.run([])
        assert not session.should_stop()
        await session.run([])
        assert session.global_step.value == 1
