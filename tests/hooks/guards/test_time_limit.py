"""TimeLimitHook: stops at the very moment, whatever is waited for, and across recoveries."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunHook,
    SharedSessionCreator,
    StopReason,
    StopTraining,
    TimeLimitHook,
)
from asynchooks._engine.base import Engine
from asynchooks.testing import RecordingHook

from ...support.helpers import counting_creator
from ..preemptions import At
from ..virtual_time import in_virtual_time, on_trampoline, pause, quarter_step

REASON = StopReason("TimeLimitHook", "1 s have passed")


@given(st.floats(0.01, 20.0))
def test_training_goes_on_until_the_run_in_which_the_time_is_up(secs: float) -> None:
    async def main(engine: Engine) -> None:
        hook = TimeLimitHook(secs)
        async with MonitoredSession([hook], FunctionSessionCreator(quarter_step)) as session:
            while not session.should_stop():
                assert engine.now() <= secs
                await session.run([])
            assert session.stop_reason == StopReason("TimeLimitHook", f"{secs:g} s have passed")
        assert secs <= engine.now() <= secs + 0.25

    on_trampoline(main)


@in_virtual_time
async def test_a_wait_of_the_body_ends_at_the_very_moment(engine: Engine) -> None:
    log = RecordingHook("a")
    async with MonitoredSession([TimeLimitHook(1), log], counting_creator()) as session:
        with pytest.raises(StopTraining, match="a stop was requested"):
            await session.or_stop(pause, 100.0)
        assert engine.now() == 1.0
        with pytest.raises(StopTraining):
            await session.global_step.wait_for(5)
    assert engine.now() == 1.0
    assert session.stop_reason == REASON
    assert log.log[-1] == ("a", "end")


@in_virtual_time
async def test_a_wait_of_another_hook_ends_at_the_very_moment(engine: Engine) -> None:
    hooks = [TimeLimitHook(1), GlobalStepWaiterHook(5)]
    async with MonitoredSession(hooks, counting_creator()) as session:
        await session.run([])
    assert engine.now() == 1.0


@in_virtual_time
async def test_the_time_runs_from_begin(engine: Engine) -> None:
    hooks = [TimeLimitHook(1), At(begin=lambda: pause(0.75))]
    async with MonitoredSession(hooks, counting_creator()) as session:
        assert engine.now() == 0.75
        with pytest.raises(StopTraining):
            await session.or_stop(pause, 100.0)
        assert engine.now() == 1.0


@in_virtual_time
async def test_it_leaves_nothing_behind_when_training_ends_before(engine: Engine) -> None:
    hook = TimeLimitHook(1)
    for end in (0.25, 0.5):
        creator = FunctionSessionCreator(quarter_step)
        async with MonitoredSession([hook], creator, stop_grace_period_secs=9) as session:
            await session.run([])
        assert engine.now() == end
        assert session.stop_reason != REASON


def lost_at(engine: Engine, *times: float) -> FunctionSessionCreator:
    """A step of a quarter second, which fails where it would begin at one of the times."""
    left = list(times)

    async def step() -> dict[str, int]:
        if left and engine.now() >= left[0]:
            left.pop(0)
            raise PreemptionError("lost")
        return await quarter_step()

    return FunctionSessionCreator(step)


@in_virtual_time
async def test_a_recovery_does_not_restart_the_time(engine: Engine) -> None:
    creator = lost_at(engine, 0.25, 0.5)
    async with MonitoredSession([TimeLimitHook(1)], creator) as session:
        for _ in range(3):
            await session.run([])
        with pytest.raises(StopTraining):
            await session.or_stop(pause, 100.0)
        assert engine.now() == 1.0
        assert session.stop_reason == REASON


@in_virtual_time
async def test_a_session_that_is_recreated_after_the_time_stops_at_once(engine: Engine) -> None:
    stops: list[bool] = []

    class NotesStop(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            stops.append(coord.should_stop())

    creator = lost_at(engine, 0.25, 0.25)
    hooks, recovery = [TimeLimitHook(1), NotesStop()], Recovery(first_pause_secs=3.0)
    async with MonitoredSession(hooks, creator, recovery=recovery) as session:
        await session.run([])
        with pytest.raises(StopTraining, match="by TimeLimitHook: 1 s have passed"):
            await session.run([])  # which is lost, and not made again
        assert engine.now() == 3.25
        assert stops == [False, False, True]
        assert session.should_stop()
        assert session.stop_reason == REASON


@in_virtual_time
async def test_the_shortest_time_ends_all_workers_of_a_shared_session(engine: Engine) -> None:
    creator = SharedSessionCreator(FunctionSessionCreator(quarter_step))
    long = MonitoredSession([TimeLimitHook(2)], creator)
    async with long, MonitoredSession([TimeLimitHook(1)], creator) as short:
        with pytest.raises(StopTraining):
            await short.or_stop(pause, 100.0)
        assert (engine.now(), long.should_stop()) == (1.0, True)
        with pytest.raises(StopTraining):
            await long.or_stop(pause, 100.0)
        assert engine.now() == 1.0
        assert long.stop_reason == short.stop_reason == REASON


@pytest.mark.anyio
async def test_in_real_time_a_foreign_wait_ends(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "asynchooks"):
        with anyio.fail_after(20):
            hooks = [TimeLimitHook(0.02)]
            async with MonitoredSession(hooks, counting_creator()) as session:
                await session.or_stop(anyio.sleep_forever)
    assert "Stop requested, by TimeLimitHook: 0.02 s have passed" in caplog.text
    assert session.stop_reason == StopReason("TimeLimitHook", "0.02 s have passed")
