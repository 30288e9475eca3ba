"""CheckpointSaverHook on step functions: a cancellation at any moment of a save locks nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    SharedSessionCreator,
    WhenBusy,
)
from asynchooks.checkpoints import CheckpointDirectory

from ...support.helpers import settle
from ..savers import Cell, CopyingSaver, Latch, PlainSaver, saved, threads_left, until
from .test_background import Held

pytestmark = pytest.mark.anyio


class SlowCopy(CopyingSaver):
    """Its copy passes by a latch, too."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.copies = Latch()

    def snapshot(self) -> Callable[[str], None]:
        self.copies.pass_by()
        return super().snapshot()


class Two:
    """One worker with a saver hook, whose scope is cancelled, and another on the same cell."""

    def __init__(self, path: Path, saver: type[PlainSaver], **options: Any) -> None:
        self.path = path
        self.cell = Cell()
        self.saver: Any = saver(self.cell)
        self.steps = Latch()  # of the other worker
        self.may_run = anyio.Event()
        options = {"save_steps": 1, **options}
        self.hook = CheckpointSaverHook(path, saver=self.saver, **options)
        creator = FunctionSessionCreator(self._step, thread_safe=True)
        self.shared = SharedSessionCreator(creator, num_workers=2)
        self.scope = anyio.CancelScope()
        self.has_left = anyio.Event()

    def _step(self, is_other: bool = False) -> dict[str, float]:
        if is_other:
            self.steps.pass_by()
        return self.cell.step()

    async def work(self, num_runs: int, before: Any = anyio.lowlevel.checkpoint) -> None:
        with self.scope:
            async with MonitoredSession([self.hook], self.shared) as session:
                await before()
                for _ in range(num_runs):
                    await session.run([])
        self.has_left.set()

    async def cancel(self, open_later: Latch | None) -> None:
        self.scope.cancel()
        if open_later is not None:
            await settle()
            assert not self.has_left.is_set()
            open_later.open()
        await self.has_left.wait()

    async def check(self, session: MonitoredSession, value: int) -> None:
        """Nothing is locked: the other worker runs, and another run may save there."""
        assert not session.global_step.statistics().is_exclusive
        with anyio.fail_after(20):
            assert await session.run("value") == value + 1
        directory = CheckpointDirectory(self.path)
        directory.open()
        directory.close()
        assert [name for name in threads_left() if "step" not in name] == []

    async def run(self, during: Callable[[MonitoredSession], Awaitable[int]]) -> None:
        async with MonitoredSession([], self.shared, step_runner="thread") as session:
            await self.check(session, await during(session))
        assert self.scope.cancelled_caught


def num_in_line(session: MonitoredSession) -> int:
    return session.global_step.statistics().tasks_waiting_for_ticket


@pytest.mark.parametrize("what", ["restore", "save"])
async def test_while_it_waits_for_a_run_under_way(what: str, tmp_path: Path) -> None:
    two = Two(tmp_path, CopyingSaver)

    async def during(session: MonitoredSession) -> int:
        async with anyio.create_task_group() as group:
            if what == "save":
                group.start_soon(two.work, 1, two.may_run.wait)
                await until(lambda: saved(tmp_path) == {0: "0"})
            two.steps.close()
            group.start_soon(session.run, "value", {"is_other": True})
            await two.steps.wait_for_arrival()
            if what == "save":
                two.may_run.set()
            else:
                group.start_soon(two.work, 1)
            await until(lambda: num_in_line(session) == 1)
            await two.cancel(None)
            assert num_in_line(session) == 0
            two.steps.open()
        assert saved(tmp_path) == ({0: "0"} if what == "save" else {})
        return two.cell.value

    await two.run(during)


@pytest.mark.parametrize("background", [False, True])
async def test_while_the_copy_is_made(background: bool, tmp_path: Path) -> None:
    two = Two(tmp_path, SlowCopy, background=background)

    async def during(session: MonitoredSession) -> int:
        two.saver.copies.close()
        async with anyio.create_task_group() as group:
            group.start_soon(two.work, 1)
            await two.saver.copies.wait_for_arrival()
            assert session.global_step.statistics().is_exclusive
            await two.cancel(two.saver.copies)
        return 0

    await two.run(during)


async def test_while_a_saver_without_copies_writes(tmp_path: Path) -> None:
    two = Two(tmp_path, PlainSaver)

    async def during(session: MonitoredSession) -> int:
        two.saver.latch.close()
        async with anyio.create_task_group() as group:
            group.start_soon(two.work, 1)
            await two.saver.latch.wait_for_arrival()
            await two.cancel(two.saver.latch)
        assert saved(tmp_path) == {0: "0"}, "what is under way is completed"
        return 0

    await two.run(during)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("num_runs", [1, 0])
async def test_while_it_waits_for_a_write(num_runs: int, background: bool, tmp_path: Path) -> None:
    two = Two(tmp_path, CopyingSaver, background=background, when_busy=WhenBusy.WAIT)

    async def during(session: MonitoredSession) -> int:
        two.saver.latch.close()
        async with anyio.create_task_group() as group:
            group.start_soon(two.work, num_runs)
            await two.saver.latch.wait_for_arrival()
            await settle()
            await two.cancel(two.saver.latch)
        assert saved(tmp_path) == {0: "0"}
        return two.cell.value

    await two.run(during)


@pytest.mark.parametrize("background", [False, True])
async def test_while_the_last_save_is_written(background: bool, tmp_path: Path) -> None:
    two = Two(tmp_path, CopyingSaver, background=background, save_steps=9)

    async def during(session: MonitoredSession) -> int:
        async with anyio.create_task_group() as group:
            group.start_soon(two.work, 2, two.may_run.wait)
            await until(lambda: saved(tmp_path) == {0: "0"})
            two.saver.latch.close()
            two.may_run.set()
            await two.saver.latch.wait_for_arrival()
            assert two.cell.value == 2
            await two.cancel(two.saver.latch)
        assert saved(tmp_path) == {0: "0", 2: "2"}
        return 2

    await two.run(during)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_native_cancellation_twice_leaves_the_write_to_its_end(tmp_path: Path) -> None:
    cell = Cell()
    saver = CopyingSaver(cell)
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver, background=True)
    saver.latch.close()

    async def work() -> None:
        async with MonitoredSession([hook], FunctionSessionCreator(cell.step)):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await saver.latch.wait_for_arrival()
    task.cancel()
    await settle()
    saver.latch.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert saved(tmp_path) == {0: "0"}
    assert threads_left() == []


async def test_no_run_begins_while_a_thread_that_was_given_up_still_copies(tmp_path: Path) -> None:
    cell = Cell()
    saver = SlowCopy(cell)
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
    shared = SharedSessionCreator(FunctionSessionCreator(cell.step), num_workers=2)
    scope, has_left = anyio.CancelScope(), anyio.Event()

    async def work() -> None:
        with scope:
            async with MonitoredSession([hook], shared, stop_grace_period_secs=0):
                pass
        has_left.set()

    async with MonitoredSession([], shared, stop_grace_period_secs=0) as session:
        saver.copies.close()
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await saver.copies.wait_for_arrival()
            scope.cancel()
            await has_left.wait()
            group.start_soon(session.run, [])
            await until(lambda: num_in_line(session) == 1)
            await settle()
            assert (cell.value, session.global_step.statistics().is_exclusive) == (0, True)
            saver.copies.open()
        assert cell.value == 1
    await until(lambda: threads_left() == [])


async def test_a_cancelled_save_that_waits_for_a_write_ends_its_exclusive_access(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path)
    async with held.session as session:
        await held.hold_the_write_of_the_next_step()
        release = await session.global_step.take_exclusive()
        raw, save = session.raw_session(), held.hook.checkpointer.save
        async with anyio.create_task_group() as group:
            group.start_soon(partial(save, raw, may_stop=False, release=release))
            await settle()
            assert session.global_step.statistics().is_exclusive
            group.cancel_scope.cancel()
        assert not session.global_step.statistics().is_exclusive
        held.latch.open()
        await held.run(1)
    assert sorted(saved(tmp_path)) == [0, 1, 2]
