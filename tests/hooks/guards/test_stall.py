"""StallHook: when a stall is reported, what stalls, what the dump shows; the threads of guards."""

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    GlobalStepWaiterHook,
    LoopLagHook,
    MonitoredSession,
    OnStall,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
    StallError,
    StallHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSessionCreator

from ...support.helpers import KeepsCoord, StartsTask, counting_creator, raises_at
from ...support.loops import LOOPS, loop_of
from ...support.moments import NOW, HeldStep, at, losing
from ...support.threads import own_threads
from ..training import run_session
from ..virtual_time import guard_threads, now, pause, quarter_step, simulate


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert guard_threads() == []


Program = Callable[[], Awaitable[None]]


@contextmanager
def reported(fn: Callable[[], object]) -> Iterator[None]:
    """The function is called whenever a stall is reported."""

    class Reports(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.getMessage().startswith("StallHook: no run of this session")
            fn()

    handler = Reports(logging.ERROR)
    logging.getLogger("asynchooks").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("asynchooks").removeHandler(handler)


def dumps_of(main: Program) -> list[float]:
    """Run the program in virtual time; when stalls of any session were reported."""
    times: list[float] = []

    async def noted() -> None:
        with reported(lambda: times.append(now())):
            await main()

    simulate(noted)
    return times


def stalls_at(*times: float) -> Callable[[Program], Callable[[], None]]:
    """Make a test of a program that is run in virtual time: when stalls are reported in it."""

    def make(main: Program) -> Callable[[], None]:
        def test() -> None:
            assert dumps_of(main) == list(times)

        return test

    return make


@stalls_at(3.5)
async def test_a_stall_is_reported_and_stops_training_that_long_after_the_last_run() -> None:
    log = RecordingHook("a")
    session = MonitoredSession([StallHook(3), log], quarter_step)
    with pytest.raises(StallError, match="ended for 3 s, since global step 2; .* more than 3 s"):
        async with session:
            for _ in range(2):
                await session.run([])
            with pytest.raises(StopTraining):
                await session.or_stop(pause, 100.0)
            assert session.should_stop()
    assert now() == 3.5
    assert str(session.stop_reason).startswith("StallHook: no run of its session has ended")
    assert [type(error) for error in log.errors] == [StallError]


@stalls_at(10.0, 20.0)
async def test_before_the_first_run_of_a_session_the_time_starts_with_the_creation() -> None:
    hooks = [StallHook(3), at(begin=lambda: pause(7)), GlobalStepWaiterHook(5)]
    for _ in range(2):
        with pytest.raises(StallError, match="since global step 0"):
            await run_session(hooks, runs=1)


@stalls_at(1.625, 4.625)
async def test_each_gap_that_is_too_long_is_reported_once_at_its_moment() -> None:
    hooks = [StallHook(1.125, OnStall.LOG)]
    async with MonitoredSession(hooks, counting_creator()) as session:
        for gap in (0.5, 2.0, 1.0, 3.0, 0.0):
            await pause(gap)
            await session.run([])
        assert not session.should_stop()


@stalls_at(2.5)
async def test_a_run_that_fails_does_not_count() -> None:
    async def step() -> dict[str, int]:
        await pause(1)
        raise ValueError("bad data")

    with pytest.raises(StallError):
        async with MonitoredSession([StallHook(2.5)], step) as session:
            while not session.should_stop():
                with pytest.raises(ValueError, match="bad data"):
                    await session.run([])


@stalls_at(15.0)
async def test_a_pause_before_a_recreation_is_no_stall_and_then_the_time_begins_again() -> None:
    times = iter([1, 1, 0, 50])

    async def step() -> dict[str, int]:
        await pause(next(times))
        if now() == 2:
            raise PreemptionError("lost")
        return {}

    with pytest.raises(StallError, match="since global step 1"):
        await run_session([StallHook(3)], step, recovery=Recovery(first_pause_secs=10.0))
    assert now() == 62  # a step that is under way is not cut short


@stalls_at()
async def test_the_watch_ends_at_a_stop_and_at_the_end_of_the_hook() -> None:
    hooks = [StallHook(3), at(end=lambda session: pause(50))]
    await run_session(hooks, runs=1)
    async with MonitoredSession(hooks, counting_creator()) as session:
        session.request_stop("enough")
        await pause(50)
    assert now() == 150


SECS = 0.05


def dumps(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if each.startswith("StallHook: ")]


async def waits_for_good() -> None:
    await anyio.sleep_forever()


@pytest.mark.parametrize("where", ["body", "hook"])
async def test_a_wait_for_another_library_ends_and_the_log_shows_it(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    keeps = KeepsCoord()
    waits = at(before_run=lambda run_context: keeps.coord.or_stop(waits_for_good))
    with pytest.raises(StallError):
        async with MonitoredSession([StallHook(SECS), keeps, waits], counting_creator()) as session:
            await (session.run([]) if where == "hook" else session.or_stop(waits_for_good))
    (dump,) = dumps(caplog)
    assert "in waits_for_good\n    await anyio.sleep_forever()" in dump


async def test_a_step_that_hangs_in_a_thread_is_given_up_after_the_grace_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step, begun = HeldStep(), time.perf_counter()
    grace_secs = 0.5  # longer than the thread's head start
    with pytest.raises(StallError, match="since global step 0"):
        await run_session([StallHook(SECS)], step, stop_grace_period_secs=grace_secs)
    assert SECS + grace_secs <= time.perf_counter() - begun
    step.may_end.set()
    (dump,) = dumps(caplog)
    assert "in __call__\n    assert self.may_end.wait(30)" in dump


async def test_the_step_of_a_worker_that_shares_the_session_is_not_given_up() -> None:
    def step(worker: str) -> dict[str, str]:
        assert may_end.wait(30)
        return {"worker": worker}

    creator, may_end = SharedSessionCreator(step), threading.Event()

    async def stalls() -> None:
        with pytest.raises(StallError):
            async with MonitoredSession([StallHook(SECS)], creator, 0, step_runner="thread") as a:
                await a.run("worker", {"worker": "stalled"})
        may_end.set()

    async with anyio.create_task_group() as group:
        async with MonitoredSession([StallHook(60)], creator, 0, step_runner="thread") as b:
            group.start_soon(stalls)
            assert await b.run("worker", {"worker": "busy"}) == "busy"
            assert "StallHook: no run of its session" in str(b.stop_reason)


async def test_a_step_that_ends_within_the_grace_period_still_counts() -> None:
    step = HeldStep()

    async def end_step(coord: Coordinator) -> None:
        await coord.wait_stopped()
        step.may_end.set()

    with pytest.raises(StallError):
        async with MonitoredSession([StallHook(SECS), StartsTask(end_step)], step, 60) as session:
            await session.run([])
            assert session.global_step.value == 1


@pytest.mark.parametrize("on_stall", OnStall)
async def test_a_step_that_holds_the_event_loop_is_reported_each_time(
    on_stall: OnStall, caplog: pytest.LogCaptureFixture
) -> None:
    def holds_the_loop() -> dict[str, int]:
        assert came.wait(30)
        came.clear()
        return {}

    came, is_stop = threading.Event(), on_stall is OnStall.STOP
    session = MonitoredSession([StallHook(SECS, on_stall)], holds_the_loop, step_runner="inline")
    with reported(came.set), pytest.raises(StallError) if is_stop else nullcontext():
        async with session:
            await session.run([])
            if is_stop:
                await session.or_stop(anyio.sleep_forever)
            await session.run([])
            assert not session.should_stop()
    assert (session.stop_reason is not None) is is_stop
    assert len(dumps(caplog)) == (1 if is_stop else 2)
    assert "in holds_the_loop\n    assert came.wait(30)" in dumps(caplog)[-1]


# Threads of guards: one for each raw session, and none is left behind

THREADS = ["asynchooks-lag", "asynchooks-stall"]


def session_with(*hooks: Any, creator: Any = dict) -> MonitoredSession:
    """Behind both guards."""
    return MonitoredSession([LoopLagHook(), StallHook(60), *hooks], creator, recovery=NOW)


async def test_a_recreated_session_has_no_thread_of_the_lost_one() -> None:
    async with session_with(creator=ScriptedSessionCreator(losing(3))) as session:
        await session.run([])
        assert sorted(guard_threads()) == THREADS


@pytest.mark.parametrize("moment", ["begin", "after_create_session", "end", "the block"])
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
async def test_threads_end_with_an_error_also_when_the_side_task_has_never_run(
    moment: str, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        async with session_with(raises_at(moment, error)):
            assert sorted(guard_threads()) == THREADS
            if moment == "the block":
                raise error
    assert guard_threads() == []


@pytest.mark.parametrize("loop", LOOPS)
def test_threads_of_a_session_that_was_not_closed_end(loop: str) -> None:
    async def forgets() -> None:
        await session_with().open()
        await anyio.lowlevel.checkpoint()
        assert "asynchooks-lag" in guard_threads()  # ends with its task, the other one at once

    backend, options = loop_of(loop)
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        anyio.run(forgets, backend=backend, backend_options=options)
    for thread in own_threads("asynchooks-stall"):
        thread.join(10)  # it was told to end, and not waited for
