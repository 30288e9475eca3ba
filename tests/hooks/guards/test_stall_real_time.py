"""StallHook in real time: what stalls, what the dump shows of it, and that no thread is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    OnStall,
    SessionRunHook,
    SharedSessionCreator,
    StallError,
    StallHook,
    StopTraining,
)

from ...support.helpers import counting_creator
from ..virtual_time import guard_threads

pytestmark = pytest.mark.anyio

SECS = 0.05


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert guard_threads() == []


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
    assert "the event loop is held" not in dump


class NeverReturns(SessionRunHook):
    """Waits for good in a moment, through the coordinator or not."""

    def __init__(self, *, through_coord: bool) -> None:
        self.through_coord = through_coord

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.coord = coord

    async def before_run(self, run_context: Any) -> None:
        if self.through_coord:
            await self.coord.or_stop(waits_for_good)
        else:
            await waits_for_good()


async def test_a_hook_that_waits_through_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    hooks = [StallHook(SECS), NeverReturns(through_coord=True)]
    with pytest.raises(StallError):
        async with MonitoredSession(hooks, counting_creator()) as session:
            await session.run([])
    (dump,) = dumps(caplog)
    assert "in before_run\n    await self.coord.or_stop(waits_for_good)" in dump
    assert "in waits_for_good" in dump


async def test_a_hook_that_never_returns_is_reported_and_left_to_cancellation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = [StallHook(SECS), NeverReturns(through_coord=False)]
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
    assert "in before_run\n    await waits_for_good()" in dump


async def test_a_step_that_hangs_in_a_thread_is_given_up_after_the_grace_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_end = threading.Event()

    def step() -> dict[str, int]:
        may_end.wait()
        return {}

    creator = FunctionSessionCreator(step)
    begun = time.perf_counter()
    try:
        with pytest.raises(StallError, match="since global step 0"):
            async with MonitoredSession([StallHook(SECS)], creator, 0.1) as session:
                await session.run([])
        assert SECS + 0.1 <= time.perf_counter() - begun < 10
    finally:
        may_end.set()
        for thread in threading.enumerate():
            if thread.name == "asynchooks-step":
                thread.join()
    (dump,) = dumps(caplog)
    assert "in step\n    may_end.wait()" in section(dump, "thread asynchooks-step")
    assert "await session.run([])" in dump


async def test_the_step_of_a_worker_that_shares_the_session_is_not_given_up() -> None:
    may_end = threading.Event()

    def step(worker: str) -> dict[str, str]:
        may_end.wait()
        return {"worker": worker}

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    results: list[str] = []

    async def stalls() -> None:
        with pytest.raises(StallError):
            async with MonitoredSession([StallHook(SECS)], creator, 0, step_runner="thread") as a:
                await a.run("worker", {"worker": "stalled"})
        may_end.set()

    async with anyio.create_task_group() as group:
        async with MonitoredSession([StallHook(60)], creator, 0, step_runner="thread") as b:
            group.start_soon(stalls)
            results.append(await b.run("worker", {"worker": "busy"}))
            assert b.should_stop()
    assert results == ["busy"]
    for thread in threading.enumerate():
        if thread.name == "asynchooks-step":
            thread.join()


async def test_a_step_that_ends_within_the_grace_period_still_counts() -> None:
    is_stopped = threading.Event()

    def step() -> dict[str, int]:
        is_stopped.wait()
        return {}

    class TellsStep(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            coord.start_soon(self.wait, coord)

        async def wait(self, coord: Coordinator) -> None:
            await coord.wait_stopped()
            is_stopped.set()

    creator = FunctionSessionCreator(step)
    with pytest.raises(StallError):
        async with MonitoredSession([StallHook(SECS), TellsStep()], creator, 60) as session:
            await session.run([])
            assert session.global_step.value == 1


def holds_the_loop() -> dict[str, int]:
    time.sleep(20 * SECS)  # what is under test: nothing else runs meanwhile
    return {}


async def test_a_step_that_holds_the_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    creator = FunctionSessionCreator(holds_the_loop)
    with pytest.raises(StallError, match="and the event loop is held"):
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
