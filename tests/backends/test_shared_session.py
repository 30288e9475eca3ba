"""Shared sessions: one raw session from the first worker's opening to the last one's end."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import (
    MonitoredSession,
    RawSession,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.simulation import Simulation, current_simulation
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import counting_creator, settle

pytestmark = pytest.mark.anyio


class Slow(SessionRunHook):
    """Its begin ends when it may."""

    def __init__(self) -> None:
        self.may_begin = anyio.Event()

    async def begin(self) -> None:
        await self.may_begin.wait()


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_a_begin_that_waits_for_a_later_worker_is_told_of_in_the_log(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        simulation, creator = current_simulation(), SharedSessionCreator(counting_creator())

        class Waits(SessionRunHook):
            async def begin(self) -> None:
                await simulation.sleep(60.0)  # as long as the other one waits to open

        async def worker(*hooks: SessionRunHook) -> None:
            async with MonitoredSession(hooks, creator):
                pass

        first = simulation.start(worker, Waits())
        second = simulation.start(worker)
        await simulation.sleep(29.0)
        assert not caplog.records
        await simulation.sleep(2.0)
        (said,) = caplog.messages
        assert "waited for the shared session for 30 s" in said
        assert "before_run" in said
        await first.wait()
        await second.wait()

    Simulation(backend=backend).run(main)


async def test_all_workers_share_one_raw_session_which_the_last_one_closes() -> None:
    raw = ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([raw]))
    first, second = MonitoredSession([], creator), MonitoredSession([], creator)
    await first.__aenter__()
    await second.__aenter__()
    assert first.raw_session() is second.raw_session() is raw
    await first.__aexit__(None, None, None)
    assert not raw.is_closed
    assert await second.run([]) == []
    await second.__aexit__(None, None, None)
    assert raw.is_closed


async def test_a_worker_that_still_opens_keeps_the_session_open() -> None:
    slow = Slow()
    raw = ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([raw]))

    async def late() -> None:
        async with MonitoredSession([slow], creator) as session:
            assert session.raw_session() is raw
            assert session.global_step.value == 1

    async with anyio.create_task_group() as group:
        async with MonitoredSession([], creator) as session:
            group.start_soon(late)
            await settle()
            await session.run([])
        assert not raw.is_closed
        slow.may_begin.set()
    assert raw.is_closed


async def test_workers_begin_one_after_another() -> None:
    log: list[str] = []

    class Begins(SessionRunHook):
        async def begin(self) -> None:
            log.append("in")
            await anyio.lowlevel.checkpoint()
            log.append("out")

    creator = SharedSessionCreator(counting_creator())

    async def worker() -> None:
        async with MonitoredSession([Begins()], creator):
            pass

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(worker)
    assert log == ["in", "out"] * 5


async def test_a_worker_cancelled_while_it_queues_to_open_lets_the_next_open() -> None:
    slow = Slow()
    raw = ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([raw]))
    opened = []

    async def worker(hooks: list[Any], name: str) -> None:
        async with MonitoredSession(hooks, creator):
            opened.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(worker, [slow], "first")
        await settle()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(worker, [], "cancelled")
                await settle()
                group.start_soon(worker, [], "third")
                await settle()
                scope.cancel()
        slow.may_begin.set()
    assert sorted(opened) == ["first", "third"]  # once both have begun, either may be first
    assert raw.is_closed


async def test_a_worker_that_fails_to_open_leaves_the_others_alone() -> None:
    class Fails(SessionRunHook):
        async def begin(self) -> None:
            raise ValueError("in begin")

    hook = RecordingHook("a")
    raw = ScriptedSession()
    creator = SharedSessionCreator(ScriptedSessionCreator([raw]))
    async with MonitoredSession([], creator) as session:
        with pytest.raises(ValueError, match="in begin"):
            async with MonitoredSession([hook, Fails()], creator):
                raise AssertionError("not reached")
        assert await session.run([]) == []
    assert hook.log == [("a", "begin"), ("a", "on_error")]


async def test_workers_in_turn_go_on_counting() -> None:
    creator = SharedSessionCreator(counting_creator())
    for last_step in (5, 10):
        async with MonitoredSession([StopAtStepHook(last_step=last_step)], creator) as session:
            while not session.should_stop():
                await session.run([])
            assert session.global_step.value == last_step


class AsyncSession(RawSession):
    """A backend whose run and close are coroutines."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    async def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        await anyio.lowlevel.checkpoint()
        self.log.append("run")
        return fetches

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.log.append("closed")


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_raw_session_may_run_and_close_in_coroutines(is_shared: bool) -> None:
    raw = AsyncSession()
    creator: SessionCreator = ScriptedSessionCreator([raw])
    if is_shared:
        creator = SharedSessionCreator(creator)
    async with MonitoredSession([], creator) as session:
        assert await session.run("x") == "x"
    assert raw.log == ["run", "closed"]


async def test_thousand_workers_share_a_function() -> None:
    creator = SharedSessionCreator(counting_creator())

    async def worker() -> None:
        async with MonitoredSession([StopAtStepHook(last_step=3000)], creator) as session:
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(worker)
    assert creator._common is not None
    assert creator._common.handle.global_step.value == 3000
    assert not creator._common.users
