"""CheckpointSaverHook on step functions that many workers share: one step in each checkpoint."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    Retention,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
    WhenBusy,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.testing import RecordingHook

from ...support.helpers import settle
from ..savers import Cell, CopyingSaver, Counter, Latch, saved, until

pytestmark = pytest.mark.anyio


class Numbers:
    """Several numbers, which each step moves by one, one after the other."""

    def __init__(self) -> None:
        self.values = [0] * 8
        self._locks = [threading.Lock() for _ in self.values]

    def step(self) -> dict[str, int]:
        for place, lock in enumerate(self._locks):
            with lock:
                self.values[place] += 1
        return {}


class NumbersSaver:
    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def save(self, path: str) -> None:
        with open(path, "w") as file:
            file.write(json.dumps([self.numbers.values[place] for place in range(8)]))

    def restore(self, path: str) -> None:
        self.numbers.values[:] = json.loads(Path(path).read_text())


class NumbersCopier(NumbersSaver):
    def snapshot(self) -> Callable[[str], Any]:
        copy = Numbers()
        for place in range(8):
            copy.values[place] = self.numbers.values[place]
        return NumbersSaver(copy).save


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("saver", [NumbersSaver, NumbersCopier])
@pytest.mark.parametrize(
    ("background", "when_busy"),
    [(False, WhenBusy.WAIT), *((True, each) for each in WhenBusy)],
)
async def test_a_checkpoint_holds_one_step_while_workers_run_in_threads(
    saver: type[NumbersSaver], background: bool, when_busy: WhenBusy, tmp_path: Path
) -> None:
    numbers = Numbers()
    hook = CheckpointSaverHook(
        tmp_path, save_steps=1, saver=saver(numbers), background=background, when_busy=when_busy,
        retention=Retention(max_to_keep=None),
    )  # fmt: skip
    shared = SharedSessionCreator(FunctionSessionCreator(numbers.step), num_workers=4)

    is_over = anyio.Event()

    async def work_beside() -> None:
        async with MonitoredSession([], shared, step_runner="thread") as session:
            while not is_over.is_set():
                await session.run([])

    async with anyio.create_task_group() as group:
        async with MonitoredSession([hook], shared, step_runner="thread") as session:
            for _ in range(3):
                group.start_soon(work_beside)
            for _ in range(10):
                await session.run([])
        is_over.set()
    found = CheckpointDirectory(tmp_path).checkpoints()
    assert len(found) >= (11 if when_busy is WhenBusy.WAIT else 2)
    assert saved(tmp_path) == {each.step: json.dumps([each.step] * 8) for each in found}


class Late:
    """Two workers on one cell; the second has the saver hook and opens on request."""

    def __init__(self, path: Path) -> None:
        self.cell = Cell()
        self.saver = CopyingSaver(self.cell)
        self.steps = Latch()
        self.hook = CheckpointSaverHook(path, save_steps=9, saver=self.saver)
        self.shared = SharedSessionCreator(FunctionSessionCreator(self.step), num_workers=2)

    def step(self) -> dict[str, float]:
        self.steps.pass_by()
        return self.cell.step()


async def test_steps_of_a_worker_that_opened_first_go_back_to_the_checkpoint(
    tmp_path: Path,
) -> None:
    first = Late(tmp_path)
    async with MonitoredSession([first.hook], first.shared) as session:
        for _ in range(3):
            await session.run([])
    for num_early in (1, 5):
        late = Late(tmp_path)
        counter = Counter()
        async with MonitoredSession([], late.shared) as early:
            for _ in range(num_early):
                await early.run([])
            async with MonitoredSession([late.hook, counter], late.shared) as session:
                assert late.cell.value == session.global_step.value == 3
                assert early.global_step.value == 3
                assert early.global_step.epoch == 1
                assert late.saver.log == ["restore 3"]
                assert await early.run("value") == 4
                assert await session.run("value") == 5
                late.cell.value = session.global_step.value - 2
                session.global_step.restart(3)  # leave the checkpoint as it was


async def test_it_waits_for_a_run_under_way_before_the_steps_go_back(tmp_path: Path) -> None:
    first = Late(tmp_path)
    async with MonitoredSession([first.hook], first.shared) as session:
        await session.run([])
    late = Late(tmp_path)
    late.steps.close()

    async def open_late() -> None:
        async with MonitoredSession([late.hook], late.shared) as session:
            assert (late.cell.value, session.global_step.value) == (1, 1)

    async with MonitoredSession([], late.shared, step_runner="thread") as early:
        async with anyio.create_task_group() as group:
            group.start_soon(early.run, [])
            await late.steps.wait_for_arrival()
            group.start_soon(open_late)
            await until(lambda: early.global_step.statistics().tasks_waiting_for_ticket == 1)
            await settle()
            assert late.saver.log == []
            late.steps.open()
    assert late.saver.log[0] == "restore 1"


class SlowCopyingSaver(CopyingSaver):
    """Waits in the midst of a restore while its latch is closed."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.restores = Latch()

    def restore(self, path: str) -> None:
        self.restores.pass_by()
        super().restore(path)


async def test_model_and_step_go_back_together_when_the_worker_that_restores_is_cancelled(
    tmp_path: Path,
) -> None:
    first = Late(tmp_path)
    async with MonitoredSession([first.hook], first.shared) as session:
        for _ in range(5):
            await session.run([])
    late = Late(tmp_path)
    saver = SlowCopyingSaver(late.cell)
    saver.restores.close()
    hook = CheckpointSaverHook(tmp_path, save_steps=9, saver=saver)
    async with MonitoredSession([], late.shared) as early:
        for _ in range(3):
            await early.run([])
        async with anyio.create_task_group() as group:
            group.start_soon(MonitoredSession([hook], late.shared).__aenter__)
            await saver.restores.wait_for_arrival()
            group.cancel_scope.cancel()
            saver.restores.open()
        assert (late.cell.value, early.global_step.value) == (5, 5)
        assert await early.run("value") == early.global_step.value == 6


async def test_a_worker_goes_on_from_the_checkpoint_that_another_was_cancelled_in_restoring(
    tmp_path: Path,
) -> None:
    first = Late(tmp_path)
    async with MonitoredSession([first.hook], first.shared) as session:
        for _ in range(5):
            await session.run([])
    late = Late(tmp_path)
    saver = SlowCopyingSaver(late.cell)
    saver.restores.close()
    hook = CheckpointSaverHook(tmp_path, save_steps=9, saver=saver)
    async with anyio.create_task_group() as group:
        group.start_soon(MonitoredSession([hook], late.shared).__aenter__)
        await saver.restores.wait_for_arrival()
        group.cancel_scope.cancel()
        saver.restores.open()
    async with MonitoredSession([], late.shared) as other:
        assert await other.run("value") == other.global_step.value == 6


async def test_a_run_after_a_step_fn_that_met_a_restore_calls_its_hooks_once(
    tmp_path: Path,
) -> None:
    first = Late(tmp_path)
    async with MonitoredSession([first.hook], first.shared) as session:
        await session.run([])
    late, hook = Late(tmp_path), RecordingHook("hook")
    async with MonitoredSession([hook], late.shared) as early:

        async def step_fn(step_context: StepContext) -> None:
            await step_context.run_with_hooks([])
            async with MonitoredSession([late.hook], late.shared):
                pass

        await early.run_step_fn(step_fn)
        hook.log.clear()
        await early.run([])
    assert [moment for _, moment in hook.log] == ["before_run", "after_run", "end"]


async def test_workers_that_restore_late_together_do_not_keep_each_other_waiting(
    tmp_path: Path,
) -> None:
    late, opened = Late(tmp_path / "a"), anyio.Event()
    other = CheckpointSaverHook(tmp_path / "b", save_steps=9, saver=late.saver)
    begun: list[object] = []

    class LogBegin(SessionRunHook):
        async def begin(self) -> None:
            begun.append(self)

    async def open_late(hook: CheckpointSaverHook) -> None:
        async with MonitoredSession([hook, LogBegin()], late.shared):
            await opened.wait()

    async with MonitoredSession([], late.shared) as early, anyio.create_task_group() as group:
        batches = early.batches(range(9))
        await anext(batches)
        group.start_soon(open_late, late.hook)
        group.start_soon(open_late, other)
        await until(lambda: len(begun) == 2)
        await settle()
        await early.run([])
        with anyio.fail_after(10):  # not for the 30 s of a loop that keeps its item
            await until(lambda: len(saved(tmp_path / "a")) + len(saved(tmp_path / "b")) == 2)
        opened.set()


async def test_a_worker_that_opens_first_without_a_checkpoint_to_come_keeps_its_steps(
    tmp_path: Path,
) -> None:
    late = Late(tmp_path)
    async with MonitoredSession([], late.shared) as early:
        await early.run([])
        async with MonitoredSession([late.hook], late.shared):
            assert saved(tmp_path) == {1: "1"}
            assert early.global_step.epoch == 0


async def test_a_second_opening_of_one_creator_restores_again(tmp_path: Path) -> None:
    late = Late(tmp_path)
    for begun in (0, 2, 4):
        async with MonitoredSession([late.hook], late.shared) as session:
            assert session.global_step.value == late.cell.value == begun
            for _ in range(2):
                await session.run([])
        late.cell.value = 77
