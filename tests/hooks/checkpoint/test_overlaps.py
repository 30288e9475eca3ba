"""CheckpointSaverHook on step functions: a recovery beside what other workers are doing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
)

from ..savers import Cell, CopyingSaver, happened
from .test_recovery import LOST, Fragile

pytestmark = pytest.mark.anyio


class Watched(CopyingSaver):
    """Notes whether a step or a save is under way while it restores."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.has_restored = threading.Event()
        self.is_under_way: str | None = None
        self.overlaps: list[str] = []

    def restore(self, path: str) -> None:
        if self.is_under_way is not None:
            self.overlaps.append(self.is_under_way)
        super().restore(path)
        self.has_restored.set()

    def hold(self, what: str) -> None:
        """Be under way until a worker restores, or it is clear that none does."""
        self.is_under_way = what
        self.has_restored.wait(0.3)
        self.is_under_way = None


async def test_nothing_is_restored_while_another_workers_step_is_under_way(tmp_path: Path) -> None:
    cell = Fragile()
    saver = Watched(cell)
    begun = threading.Event()

    def step(is_slow: bool = False) -> dict[str, float]:
        if is_slow:
            begun.set()
            saver.hold("a step")
        return cell.step()

    hook = CheckpointSaverHook(tmp_path, save_steps=9, saver=saver)
    shared = SharedSessionCreator(FunctionSessionCreator(step), num_workers=2)
    async with (
        MonitoredSession([hook], shared) as a,
        MonitoredSession([Loses(begun)], shared, step_runner="thread") as b,
    ):
        async with anyio.create_task_group() as group:
            group.start_soon(a_run, a)
            await happened(begun)
            await b.run([])
        assert saver.overlaps == []
        assert cell.value == a.global_step.value


async def a_run(session: MonitoredSession) -> None:
    await session.run("value", {"is_slow": True})


class Loses(SessionRunHook):
    """Finds the session lost in its first run."""

    def __init__(self, begun: threading.Event) -> None:
        self.begun = begun
        self.is_done = False

    async def before_run(self, run_context: Any) -> None:
        if not self.is_done and self.begun.is_set():
            self.is_done = True
            raise LOST


class WatchedCopy(Watched):
    begun = threading.Event()
    is_slow = False

    def snapshot(self) -> Callable[[str], None]:
        value = self.cell.value
        if self.is_slow:
            self.begun.set()
            self.hold("a save")
            assert self.cell.value == value, "the copy mixes two states"
        return lambda path: self._write(path, value)


async def test_nothing_is_restored_while_the_hook_copies_the_model(tmp_path: Path) -> None:
    cell = Fragile()
    saver = WatchedCopy(cell)
    saver.begun = threading.Event()
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
    shared = SharedSessionCreator(FunctionSessionCreator(cell.step), num_workers=2)
    async with (
        MonitoredSession([hook], shared) as a,
        MonitoredSession([Loses(saver.begun)], shared) as b,
    ):
        saver.is_slow = True
        async with anyio.create_task_group() as group:
            group.start_soon(a.run, [])
            await happened(saver.begun)
            await b.run([])
            saver.is_slow = False
        assert saver.overlaps == []


async def test_the_error_of_a_write_leaves_although_another_worker_replaced_the_session(
    tmp_path: Path,
) -> None:
    class Waits(SessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            arrived.set()
            await may_go_on.wait()

    cell, arrived, may_go_on = Fragile(), anyio.Event(), anyio.Event()
    saver = CopyingSaver(cell, None, ZeroDivisionError("in a write"))
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver, background=True)
    shared = SharedSessionCreator(FunctionSessionCreator(cell.step), num_workers=2)
    waits = Waits()
    may_go_on.set()
    seen: list[BaseException] = []

    async def work(session: MonitoredSession) -> None:
        try:
            await session.run([])
        except ZeroDivisionError as error:
            seen.append(error)

    async with MonitoredSession([], shared) as b:
        try:
            async with MonitoredSession([waits, hook], shared) as a:
                await hook.checkpointer.writer.wait_idle()
                saver.latch.close()
                await a.run([])
                await saver.latch.wait_for_arrival()
                arrived, may_go_on = anyio.Event(), anyio.Event()
                async with anyio.create_task_group() as group:
                    group.start_soon(work, a)
                    await arrived.wait()
                    saver.latch.open()
                    cell.is_lost = True
                    await b.run([])
                    may_go_on.set()
        except ZeroDivisionError as error:
            seen.append(error)
    assert [str(error) for error in seen] == ["in a write"]
