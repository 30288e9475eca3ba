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
from asynchooks.testing import RecordingHook

from ...support.helpers import StartsTask, counting_creator
from ...support.threads import own_threads
from ..preemptions import At
from ..training import run_session
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
    session = MonitoredSession([StallHook(3), log], quarter_step)
    with pytest.raises(StallError, match="ended for 3 s, since global step 2; .* more than 3 s"):
        async with session:
            for _ in range(2):
                await session.run([])
            with pytest.raises(StopTraining):
                await session.or_stop(pause, 100.0)
            assert session.should_stop()
    assert engine.now() == 3.5
    assert str(session.stop_reason).startswith("StallHook: no run of its session has ended")
    assert [type(error) for error in log.errors] == [StallError]


@stalls_at(10.0, 20.0)
async def test_before_the_first_run_of_a_session_the_time_starts_with_the_creation(
    engine: Engine,
) -> None:
    hooks = [StallHook(3), At(begin=lambda: pause(7)), GlobalStepWaiterHook(5)]
    for _ in range(2):
        with pytest.raises(StallError, match="since global step 0"):
            await run_session(hooks, runs=1)


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
        async with MonitoredSession([StallHook(2.5)], step) as session:
            while not session.should_stop():
                with pytest.raises(ValueError, match="bad data"):
                    await session.run([])


@stalls_at(15.0)
async def test_a_pause_before_a_recreation_is_no_stall_and_then_the_time_begins_again(
    engine: Engine,
) -> None:
    times = iter([1, 1, 0, 50])

    async def step() -> dict[str, int]:
        await pause(next(times))
        if engine.now() == 2:
            raise PreemptionError("lost")
        return {}

    with pytest.raises(StallError, match="since global step 1"):
        await run_session([StallHook(3)], step, recovery=Recovery(first_pause_secs=10.0))
    assert engine.now() == 62  # a step that is under way is not cut short


@stalls_at(2.25)
async def test_of_two_workers_the_one_that_stalls_fails_and_the_other_stops(
    engine: Engine,
) -> None:
    creator = SharedSessionCreator(quarter_step)
    healthy = MonitoredSession([StallHook(2)], creator)

    async def stalls() -> None:
        with pytest.raises(StallError, match="ended for 2 s"):
            async with MonitoredSession([StallHook(2)], creator) as session:
                await session.run([])
                await session.or_stop(pause, 100.0)

    async with healthy:
        task = engine.start(stalls)
        while not healthy.should_stop():
            await healthy.run([])
    await task.wait()
    assert "StallHook: no run of its session has ended for 2 s" in str(healthy.stop_reason)


@stalls_at()
async def test_the_watch_ends_at_a_stop_and_at_the_end_of_the_hook(engine: Engine) -> None:
    hooks = [StallHook(3), At(end=lambda: pause(50))]
    await run_session(hooks, runs=1)
    async with MonitoredSession(hooks, counting_creator()) as session:
        session.request_stop("enough")
        await pause(50)
    assert engine.now() == 150


SECS = 0.05


def dumps(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if each.startswith("StallHook: ")]


async def waits_for_good() -> None:
    await anyio.sleep_forever()


class Waits(SessionRunHook):
    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.coord = coord

    async def before_run(self, run_context: Any) -> None:
        await self.coord.or_stop(waits_for_good)


@pytest.mark.parametrize("where", ["body", "hook"])
async def test_a_wait_for_another_library_ends_and_the_log_shows_it(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StallError):
        async with MonitoredSession([StallHook(SECS), Waits()], counting_creator()) as session:
            await (session.run([]) if where == "hook" else session.or_stop(waits_for_good))
    (dump,) = dumps(caplog)
    assert "in waits_for_good\n    await anyio.sleep_forever()" in dump


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

    begun, grace_secs = time.perf_counter(), 0.5  # longer than the thread's head start
    with steps_are_held() as may_end:
        with pytest.raises(StallError, match="since global step 0"):
            await run_session([StallHook(SECS)], step, stop_grace_period_secs=grace_secs)
        assert SECS + grace_secs <= time.perf_counter() - begun
    (dump,) = dumps(caplog)
    assert "in step\n    may_end.wait()" in dump


async def test_the_step_of_a_worker_that_shares_the_session_is_not_given_up() -> None:
    def step(worker: str) -> dict[str, str]:
        may_end.wait()
        return {"worker": worker}

    creator = SharedSessionCreator(step)

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

    async def end_step(coord: Coordinator) -> None:
        await coord.wait_stopped()
        is_stopped.set()

    def step() -> dict[str, int]:
        is_stopped.wait()
        return {}

    with pytest.raises(StallError):
        async with MonitoredSession([StallHook(SECS), StartsTask(end_step)], step, 60) as session:
            await session.run([])
            assert session.global_step.value == 1


class Reports(logging.Handler):
    """Says that a stall was reported."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.came.set()


@pytest.mark.parametrize("on_stall", OnStall)
async def test_a_step_that_holds_the_event_loop_is_reported_each_time(
    on_stall: OnStall, caplog: pytest.LogCaptureFixture
) -> None:
    def holds_the_loop() -> dict[str, int]:
        assert reports.came.wait(30)
        reports.came.clear()
        return {}

    reports, is_stop = Reports(), on_stall is OnStall.STOP
    logging.getLogger("asynchooks").addHandler(reports)
    session = MonitoredSession([StallHook(SECS, on_stall)], holds_the_loop, step_runner="inline")
    try:
        async with session:
            await session.run([])
            if is_stop:
                await session.or_stop(anyio.sleep_forever)
            await session.run([])
            assert not session.should_stop()
    except StallError:
        assert is_stop
    finally:
        logging.getLogger("asynchooks").removeHandler(reports)
    assert (session.stop_reason is not None) is is_stop
    assert len(dumps(caplog)) == (1 if is_stop else 2)
    assert "in holds_the_loop\n    assert reports.came.wait(30)" in dumps(caplog)[-1]
