"""TimeLimitHook: stops at the very moment, whatever is waited for, and across recoveries."""

import anyio
import pytest

from asynchooks import (
    MonitoredSession,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
    StopReason,
    StopTraining,
    TimeLimitHook,
)
from asynchooks.testing import RecordingHook

from ...support.helpers import KeepsCoord, counting_creator
from ...support.moments import at
from ..training import run_session
from ..virtual_time import in_virtual_time, now, pause, quarter_step

REASON = StopReason("TimeLimitHook", "1 s have passed")


@in_virtual_time
async def test_a_wait_of_the_body_ends_at_the_very_moment_counted_from_begin() -> None:
    log = RecordingHook("a")
    hooks = [TimeLimitHook(1), at(begin=lambda: pause(0.75)), log]
    async with MonitoredSession(hooks, counting_creator()) as session:
        with pytest.raises(StopTraining, match="a stop was requested"):
            await session.or_stop(pause, 100.0)
        assert now() == 1.0
        with pytest.raises(StopTraining):
            await session.global_step.wait_for(5)
    assert now() == 1.0
    assert session.stop_reason == REASON
    assert log.log[-1] == ("a", "end")


@in_virtual_time
async def test_it_leaves_nothing_behind_when_training_ends_before() -> None:
    hook = TimeLimitHook(1)
    for end in (0.25, 0.5):
        session = await run_session([hook], quarter_step, runs=1, stop_grace_period_secs=9)
        assert now() == end
        assert session.stop_reason != REASON


@in_virtual_time
async def test_a_session_that_is_recreated_after_the_time_stops_at_once() -> None:
    async def step() -> dict[str, int]:
        if len(keeps.coords) < 3 and now():
            raise PreemptionError("lost")
        return await quarter_step()

    keeps, recovery = KeepsCoord(), Recovery(first_pause_secs=3.0)
    async with MonitoredSession([TimeLimitHook(1), keeps], step, recovery=recovery) as session:
        await session.run([])
        with pytest.raises(StopTraining, match="by TimeLimitHook: 1 s have passed"):
            await session.run([])  # which is lost, and not made again
        assert now() == 3.25
        assert keeps.coord.should_stop()
        assert session.stop_reason == REASON


@in_virtual_time
async def test_the_shortest_time_ends_all_workers_of_a_shared_session() -> None:
    creator = SharedSessionCreator(quarter_step)
    async with MonitoredSession([TimeLimitHook(2)], creator) as long:
        async with MonitoredSession([TimeLimitHook(1)], creator) as short:
            await short.or_stop(pause, 100.0)
        assert (now(), long.should_stop()) == (1.0, True)
        await long.or_stop(pause, 100.0)
    assert now() == 1.0
    assert long.stop_reason == short.stop_reason == REASON


async def test_in_real_time_a_foreign_wait_ends() -> None:
    with anyio.fail_after(20):
        async with MonitoredSession([TimeLimitHook(0.02)], counting_creator()) as session:
            await session.or_stop(anyio.sleep_forever)
    assert session.stop_reason == StopReason("TimeLimitHook", "0.02 s have passed")
