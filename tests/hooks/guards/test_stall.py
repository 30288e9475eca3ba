"""StallHook: when a stall is reported, to the moment, what stalls, and what the dump shows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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
from ...support.threads import own_threads
from ..preemptions import At
from ..virtual_time import guard_threads, logged_at, on_trampoline, pause, quarter_step

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert guard_threads() == []


Program = Callable[[Engine], Awaitable[None]]


def dumps_of(main: Program) -> list[float]:
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


def stalls_at(*times: float) -> Callable[[Program], Callable[[], None]]:
    """Make a test of a program that is run in virtual time: when stalls are reported in it."""

    def make(main: Program) -> Callable[[], None]:
        def test() -> None:
            assert dumps_of(main) == list(times)

        return test

    return make


@stalls_at(3.5)
async def test_a_stall_is_reported_and_stops_training_that_long_after_the_last_run(
    engine: Engine,
) -> None:
    log = RecordingHook("a")
    session = MonitoredSession([StallHook(3), log], FunctionSessionCreator(quarter_step))
    with pytest.raises(StallError, match="ended for 3 s, since global step 2; .* more than 3 s"):
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


@stalls_at(10.0)
async def test_before_the_first_run_the_time_starts_with_the_creation(engine: Engine) -> None:
    hooks = [StallHook(3), At(begin=lambda: pause(7)), GlobalStepWaiterHook(5)]
    with pytest.raises(StallError, match="since global step 0"):
        async with MonitoredSession(hooks, counting_creator()) as session:
            await session.run([])


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


@stalls_at(2.5)
async def test_a_run_that_fails_does_not_count(engine: Engine) -> None:
    async def step() -> dict[str, int]:
        await pause(1)
        raise ValueError("bad data")

    with pytest.raises(StallError):
        async with MonitoredSession([StallHook(2.5)], FunctionSessionCreator(step)) as session:
            while not session.should_stop():
                with pytest.raises(ValueError, match="bad data"):
                    await session.run([])


@stalls_at(5.0)
async def test_a_recreated_session_has_the_whole_time_again(engine: Engine) -> None:
    times = iter([1, 1, 50])

    async def step() -> dict[str, int]:
        await pause(next(times))
        if current_engine().now() == 2:
            raise PreemptionError("lost")
        return {}

    hooks, recovery = [StallHook(3)], Recovery(max_attempts=1)
    creator = FunctionSessionCreator(step)
    with pytest.raises(StallError, match="since global step 1"):
        async with MonitoredSession(hooks, creator, recovery=recovery) as session:
            while not session.should_stop():
                await session.run([])
    assert engine.now() == 52  # a step that is under way is not cut short


@stalls_at()
async def test_the_pause_before_a_recreation_is_no_stall(engine: Engine) -> None:
    failures = iter([PreemptionError("lost"), PreemptionError("lost")])

    def step() -> dict[str, int]:
        for failure in failures:
            raise failure
        return {}

    recovery = Recovery(first_pause_secs=10.0)
    creator = FunctionSessionCreator(step)
    async with MonitoredSession([StallHook(3)], creator, recovery=recovery) as session:
        await session.run([])
    assert engine.now() == 10


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


@stalls_at()
async def test_the_watch_ends_at_a_stop_and_at_the_end_of_the_hook(engine: Engine) -> None:
    hooks = [StallHook(3), At(end=lambda: pause(50))]
    async with MonitoredSession(hooks, counting_creator()) as session:
        await session.run([])
    async with MonitoredSession(hooks, counting_creator()) as session:
        session.request_stop("enough")
        await pause(50)
    assert engine.now() == 150


@stalls_at(3.0, 6.0)
async def test_one_hook_may_serve_one_session_after_the_other(engine: Engine) -> None:
    hook = StallHook(3)

    for _ in range(2):
        with pytest.raises(StallError):
            async with MonitoredSession([hook], counting_creator()) as session:
                await session.or_stop(pause, 100.0)


@stalls_at()
async def test_in_virtual_time_there_is_no_thread(engine: Engine) -> None:
    async with MonitoredSession([StallHook(3)], counting_creator()):
        assert guard_threads() == []


SECS = 0.05


def dumps(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    return [message for message in messages if message.startswith("StallHook: ")]


def section(dump: str, title: str) -> str:
    """What a dump says of one task or thread."""
    return dump.partition(f"{title}:\n")[2].partition("\nt")[0]


async def waits_for_good() -> None:
    await anyio.sleep_forever()


async def test_a_foreign_wait_of_the_body(caplog: pytest.LogCaptureFixture) -> None:
    begun = time.perf_counter()
    with pytest.raises(StallError):
        async with MonitoredSession([StallHook(SECS)], counting_creator()) as session:
            await session.or_stop(waits_for_good)
    assert time.perf_counter() - begun >= SECS
    (dump,) = dumps(caplog)
    assert "in waits_for_good\n    await anyio.sleep_forever()" in dump
    assert "await session.or_stop(waits_for_good)" in dump


async def test_a_hook_that_waits_through_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    class WaitsThroughCoordinator(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            self.coord = coord

        async def before_run(self, run_context: Any) -> None:
            await self.coord.or_stop(waits_for_good)

    with pytest.raises(StallError):
        hooks = [StallHook(SECS), WaitsThroughCoordinator()]
        async with MonitoredSession(hooks, counting_creator()) as session:
            await session.run([])
    (dump,) = dumps(caplog)
    assert "in before_run\n    await self.coord.or_stop(waits_for_good)" in dump
    assert "in waits_for_good" in dump


async def test_a_hook_that_never_returns_is_reported_and_left_to_cancellation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = [StallHook(SECS), At(before_run=waits_for_good)]
    session = MonitoredSession(hooks, counting_creator())
    with anyio.CancelScope() as scope:

        async def cancel_at_the_stop() -> None:
            with pytest.raises(StopTraining):
                await session.or_stop(anyio.sleep_forever)
            scope.cancel()

        with pytest.raises(StallError):
            async with session:
                async with anyio.create_task_group() as group:
                    group.start_soon(cancel_at_the_stop)
                    await session.run([])
    (dump,) = dumps(caplog)
    assert 'in before_run\n    await self._at("before_run")' in dump
    assert "in waits_for_good" in dump


@contextmanager
def steps_are_held() -> Iterator[threading.Event]:
    """Steps that wait in their threads end with the block, if not before."""
    may_end = threading.Event()
    try:
        yield may_end
    finally:
        may_end.set()
        for thread in own_threads("asynchooks-step"):
            thread.join()


async def test_a_step_that_hangs_in_a_thread_is_given_up_after_the_grace_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def step() -> dict[str, int]:
        may_end.wait()
        return {}

    creator, grace_secs = FunctionSessionCreator(step), 0.5  # longer than the thread's head start
    begun = time.perf_counter()
    with steps_are_held() as may_end:
        with pytest.raises(StallError, match="since global step 0"):
            async with MonitoredSession([StallHook(SECS)], creator, grace_secs) as session:
                await session.run([])
        assert SECS + grace_secs <= time.perf_counter() - begun < 10
    (dump,) = dumps(caplog)
    assert "in step\n    may_end.wait()" in section(dump, "thread asynchooks-step")
    assert "await session.run([])" in dump


async def test_the_step_of_a_worker_that_shares_the_session_is_not_given_up() -> None:
    def step(worker: str) -> dict[str, str]:
        may_end.wait()
        return {"worker": worker}

    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def stalls() -> None:
        with pytest.raises(StallError):
            async with MonitoredSession([StallHook(SECS)], creator, 0, step_runner="thread") as a:
                await a.run("worker", {"worker": "stalled"})
        may_end.set()

    with steps_are_held() as may_end:
        async with anyio.create_task_group() as group:
            async with MonitoredSession([StallHook(60)], creator, 0, step_runner="thread") as b:
                group.start_soon(stalls)
                assert await b.run("worker", {"worker": "busy"}) == "busy"
                assert b.should_stop()


async def test_a_step_that_ends_within_the_grace_period_still_counts() -> None:
    is_stopped = threading.Event()

    def step() -> dict[str, int]:
        is_stopped.wait()
        return {}

    class EndsStep(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            coord.start_soon(self.wait, coord)

        async def wait(self, coord: Coordinator) -> None:
            await coord.wait_stopped()
            is_stopped.set()

    creator = FunctionSessionCreator(step)
    with pytest.raises(StallError):
        async with MonitoredSession([StallHook(SECS), EndsStep()], creator, 60) as session:
            await session.run([])
            assert session.global_step.value == 1


def holds_the_loop() -> dict[str, int]:
    time.sleep(20 * SECS)  # what is under test: nothing else runs meanwhile
    return {}


async def test_a_step_that_holds_the_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    creator = FunctionSessionCreator(holds_the_loop)
    with pytest.raises(StallError, match="since global step 0"):
        async with MonitoredSession([StallHook(SECS)], creator, step_runner="inline") as session:
            while not session.should_stop():
                await session.run([])
    (dump,) = dumps(caplog)
    held = section(dump, f"thread {threading.current_thread().name}")
    assert "in holds_the_loop\n    time.sleep(20 * SECS)" in held
    assert "await session.run([])" in held


async def test_a_stall_that_is_only_logged_is_reported_once_and_the_next_one_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    creator = FunctionSessionCreator(holds_the_loop)
    hooks = [StallHook(SECS, OnStall.LOG)]
    async with MonitoredSession(hooks, creator, step_runner="inline") as session:
        for _ in range(2):
            await session.run([])
        assert not session.should_stop()
        assert guard_threads() == ["asynchooks-stall"]
    assert len(dumps(caplog)) == 2


async def test_a_session_that_goes_on_has_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    async with MonitoredSession([StallHook(60)], counting_creator()) as session:
        for _ in range(1000):
            await session.run([])
    assert dumps(caplog) == []
