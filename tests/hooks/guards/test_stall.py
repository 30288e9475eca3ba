"""StallHook in virtual time: when a stall is reported, to the moment, and what follows."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import (
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    OnStall,
    PreemptionError,
    Recovery,
    SessionRunHook,
    SharedSessionCreator,
    StallError,
    StallHook,
    StopTraining,
)
from asynchooks._engine.base import Engine
from asynchooks._engine.current import current_engine
from asynchooks.testing import RecordingHook

from ...support.helpers import counting_creator
from ..virtual_time import guard_threads, logged_at, on_trampoline, pause, quarter_step


def dumps_of(main: Callable[[Engine], Awaitable[None]]) -> list[float]:
    """Run the program in virtual time; when stalls of any session were reported."""
    reports: list[tuple[float, str]] = []

    async def noted(engine: Engine) -> None:
        with logged_at(engine, logging.ERROR) as records:
            try:
                await main(engine)
            finally:
                reports.extend(records)

    on_trampoline(noted)
    assert all(message.startswith("StallHook: no run of this session") for _, message in reports)
    return [time for time, _ in reports]


def test_a_stall_is_reported_and_stops_training_that_long_after_the_last_run() -> None:
    log = RecordingHook("a")

    async def main(engine: Engine) -> None:
        session = MonitoredSession([StallHook(3), log], FunctionSessionCreator(quarter_step))
        with pytest.raises(
            StallError, match="ended for 3 s, since global step 2; .* more than 3 s"
        ):
            async with session:
                for _ in range(2):
                    await session.run([])
                with pytest.raises(StopTraining):
                    await session.or_stop(pause, 100.0)
                assert session.should_stop()
        assert engine.now() == 3.5
        assert session.stop_reason is not None
        assert str(session.stop_reason).startswith("StallHook: no run of its session has ended")
        assert [type(error) for error in log.errors] == [StallError]

    assert dumps_of(main) == [3.5]


def test_before_the_first_run_the_time_starts_with_the_creation() -> None:
    class SlowToBegin(SessionRunHook):
        async def begin(self) -> None:
            await pause(7)

    async def main(engine: Engine) -> None:
        hooks = [StallHook(3), SlowToBegin(), GlobalStepWaiterHook(5)]
        with pytest.raises(StallError, match="since global step 0"):
            async with MonitoredSession(hooks, counting_creator()) as session:
                await session.run([])

    assert dumps_of(main) == [10.0]


@given(st.lists(st.integers(0, 20).map(lambda quarters: quarters / 4), max_size=8))
def test_each_gap_that_is_too_long_is_reported_once_at_its_moment(gaps: list[float]) -> None:
    secs = 1.125  # so that no run ends at the moment of a stall
    expected = []

    async def main(engine: Engine) -> None:
        hooks = [StallHook(secs, OnStall.LOG)]
        async with MonitoredSession(hooks, counting_creator()) as session:
            for gap in gaps:
                if gap > secs:
                    expected.append(engine.now() + secs)
                await pause(gap)
                await session.run([])
            assert not session.should_stop()

    assert dumps_of(main) == expected


def test_a_run_that_fails_does_not_count() -> None:
    async def step() -> dict[str, int]:
        await pause(1)
        raise ValueError("bad data")

    async def main(engine: Engine) -> None:
        with pytest.raises(StallError):
            async with MonitoredSession([StallHook(2.5)], FunctionSessionCreator(step)) as session:
                while not session.should_stop():
                    with pytest.raises(ValueError, match="bad data"):
                        await session.run([])

    assert dumps_of(main) == [2.5]


def test_a_recreated_session_has_the_whole_time_again() -> None:
    times = iter([1, 1, 50])

    async def step() -> dict[str, int]:
        await pause(next(times))
        if current_engine().now() == 2:
            raise PreemptionError("lost")
        return {}

    async def main(engine: Engine) -> None:
        hooks, recovery = [StallHook(3)], Recovery(max_attempts=1)
        creator = FunctionSessionCreator(step)
        with pytest.raises(StallError, match="since global step 1"):
            async with MonitoredSession(hooks, creator, recovery=recovery) as session:
                while not session.should_stop():
                    await session.run([])
        assert engine.now() == 52  # a step that is under way is not cut short

    assert dumps_of(main) == [5.0]


def test_the_pause_before_a_recreation_is_no_stall() -> None:
    failures = iter([PreemptionError("lost"), PreemptionError("lost")])

    def step() -> dict[str, int]:
        for failure in failures:
            raise failure
        return {}

    async def main(engine: Engine) -> None:
        recovery = Recovery(first_pause_secs=10.0)
        creator = FunctionSessionCreator(step)
        async with MonitoredSession([StallHook(3)], creator, recovery=recovery) as session:
            await session.run([])
        assert engine.now() == 10

    assert dumps_of(main) == []


def test_of_two_workers_the_one_that_stalls_fails_and_the_other_stops() -> None:
    async def main(engine: Engine) -> None:
        creator = SharedSessionCreator(FunctionSessionCreator(quarter_step))
        healthy = MonitoredSession([StallHook(2)], creator)

        async def stalls() -> None:
            with pytest.raises(StallError, match="ended for 2 s"):
                async with MonitoredSession([StallHook(2)], creator) as session:
                    await session.run([])
                    with pytest.raises(StopTraining):
                        await session.or_stop(pause, 100.0)

        async with healthy:
            task = engine.start(stalls)
            while not healthy.should_stop():
                await healthy.run([])
        await task.wait()
        assert healthy.stop_reason is not None
        assert str(healthy.stop_reason) == (
            "StallHook: no run of its session has ended for 2 s, since global step 9"
        )
        assert engine.now() < 3

    assert len(dumps_of(main)) == 1


def test_the_watch_ends_at_a_stop_and_at_the_end_of_the_hook() -> None:
    class SlowToEnd(SessionRunHook):
        async def end(self, session: Any) -> None:
            await pause(50)

    async def main(engine: Engine) -> None:
        hooks = [StallHook(3), SlowToEnd()]
        async with MonitoredSession(hooks, counting_creator()) as session:
            await session.run([])
        async with MonitoredSession(hooks, counting_creator()) as session:
            session.request_stop("enough")
            await pause(50)
        assert engine.now() == 150

    assert dumps_of(main) == []


def test_one_hook_may_serve_one_session_after_the_other() -> None:
    hook = StallHook(3)

    async def main(engine: Engine) -> None:
        for _ in range(2):
            with pytest.raises(StallError):
                async with MonitoredSession([hook], counting_creator()) as session:
                    await session.or_stop(pause, 100.0)

    assert dumps_of(main) == [3.0, 6.0]


def test_in_virtual_time_there_is_no_thread() -> None:
    async def main(engine: Engine) -> None:
        async with MonitoredSession([StallHook(3)], counting_creator()):
            assert guard_threads() == []

    assert dumps_of(main) == []
