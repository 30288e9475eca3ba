"""CheckpointSaverHook on step functions: what training does while a checkpoint is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    FunctionSessionCreator,
    MonitoredSession,
    WhenBusy,
)

from ...support.helpers import settle
from ..savers import Cell, CopyingSaver, Latch, PlainSaver, saved, threads_left, until

pytestmark = pytest.mark.anyio


class Held:
    """A session on a cell whose checkpoints are written when the test lets them."""

    def __init__(self, path: Path, saver: type[PlainSaver] = CopyingSaver, **options: Any) -> None:
        self.cell = Cell()
        self.saver = saver(self.cell)
        self.hook = CheckpointSaverHook(
            path, saver=self.saver, **{"save_steps": 1, "background": True, **options}
        )
        self.session = MonitoredSession([self.hook], FunctionSessionCreator(self.cell.step))

    @property
    def latch(self) -> Latch:
        return self.saver.latch

    async def hold_the_write_of_the_next_step(self) -> None:
        await self.hook.checkpointer.writer.wait_idle()
        self.latch.close()
        await self.session.run([])
        await self.latch.wait_for_arrival()

    async def run(self, num_runs: int) -> None:
        for _ in range(num_runs):
            await self.session.run([])

    def written(self) -> list[int]:
        return [int(line.split()[1]) for line in self.saver.log if line.startswith("begin")]


async def test_steps_go_on_while_a_copy_is_written_and_the_copy_stays_as_it_was(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path, save_steps=5)
    async with held.session:
        await held.run(4)
        await held.hold_the_write_of_the_next_step()
        await held.run(4)
        assert held.cell.value == 9
        assert sorted(saved(tmp_path)) == [0]
        held.latch.open()
    assert saved(tmp_path) == {0: "0", 5: "5", 9: "9"}
    assert threads_left() == []


@pytest.mark.parametrize(
    ("saver", "background"), [(PlainSaver, False), (PlainSaver, True), (CopyingSaver, False)]
)
async def test_without_background_or_a_copy_the_run_waits_for_the_write(
    saver: type[PlainSaver], background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, saver, background=background)
    async with held.session:
        held.latch.close()
        async with anyio.create_task_group() as group:
            group.start_soon(held.run, 2)
            await held.latch.wait_for_arrival()
            await until(lambda: held.cell.value == 1)
            await settle()
            assert held.cell.value == 1
            held.latch.open()
    assert saved(tmp_path) == {0: "0", 1: "1", 2: "2"}


async def test_wait_holds_the_run_until_the_earlier_one_is_written(tmp_path: Path) -> None:
    held = Held(tmp_path, when_busy=WhenBusy.WAIT)
    async with held.session:
        await held.hold_the_write_of_the_next_step()
        async with anyio.create_task_group() as group:
            group.start_soon(held.run, 3)
            await until(lambda: held.cell.value == 2)
            await settle()
            assert (held.cell.value, held.written()) == (2, [0, 1])
            held.latch.open()
    assert held.written() == [0, 1, 2, 3, 4]
    assert sorted(saved(tmp_path)) == [0, 1, 2, 3, 4]


async def test_skip_leaves_out_what_is_due_meanwhile_and_counts_from_there(tmp_path: Path) -> None:
    held = Held(tmp_path, save_steps=2, when_busy=WhenBusy.SKIP)
    async with held.session:
        await held.run(1)
        await held.hold_the_write_of_the_next_step()
        await held.run(2)  # the 4th step was due
        held.latch.open()
        await held.hook.checkpointer.writer.wait_idle()
        await held.run(3)
    assert held.written() == [0, 2, 6, 7]
    assert saved(tmp_path) == {step: str(step) for step in (0, 2, 6, 7)}


async def test_skip_saves_the_end_all_the_same(tmp_path: Path) -> None:
    held = Held(tmp_path, when_busy=WhenBusy.SKIP)
    async with held.session:
        await held.hold_the_write_of_the_next_step()
        await held.run(2)
        held.latch.open()
    assert held.written() == [0, 1, 3]


async def test_supersede_writes_the_newest_next(tmp_path: Path) -> None:
    held = Held(tmp_path, when_busy=WhenBusy.SUPERSEDE)
    async with held.session:
        await held.hold_the_write_of_the_next_step()
        await held.run(3)
        assert held.cell.value == 4
        held.latch.open()
        await held.hook.checkpointer.writer.wait_idle()
        assert held.written() == [0, 1, 4]
        await held.run(1)
    assert saved(tmp_path) == {step: str(step) for step in (0, 1, 4, 5)}


async def test_supersede_at_the_end_writes_the_last(tmp_path: Path) -> None:
    held = Held(tmp_path, save_steps=2, when_busy=WhenBusy.SUPERSEDE)
    async with held.session:
        await held.run(1)
        await held.hold_the_write_of_the_next_step()
        await held.run(3)
        async with anyio.create_task_group() as group:
            group.start_soon(held.session.close)
            await settle()
            assert held.written() == [0, 2]
            held.latch.open()
    assert held.written() == [0, 2, 5]


async def test_the_end_waits_for_the_last_write_before_listeners_and_the_directory(
    tmp_path: Path,
) -> None:
    log: list[str] = []

    class Notes(CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> None:
            log.append(f"saved {global_step_value} as {sorted(saved(tmp_path))}")

        async def end(self, session: Any, global_step_value: int) -> None:
            log.append(f"end at {global_step_value}")

    held = Held(tmp_path, listeners=[Notes()])
    async with held.session:
        await held.hold_the_write_of_the_next_step()
        async with anyio.create_task_group() as group:
            group.start_soon(held.session.close)
            await settle()
            assert log == ["saved 0 as [0]"]
            held.latch.open()
    assert log == ["saved 0 as [0]", "saved 1 as [0, 1]", "end at 1"]


async def test_the_first_checkpoint_holds_training_up_only_for_its_copy(tmp_path: Path) -> None:
    held = Held(tmp_path, save_steps=10)
    held.latch.close()
    async with held.session:
        await held.latch.wait_for_arrival()
        await held.run(2)
        assert saved(tmp_path) == {}
        held.latch.open()
    assert saved(tmp_path) == {0: "0", 2: "2"}


async def test_a_listeners_answer_stops_training_from_a_write_beside_it(tmp_path: Path) -> None:
    class Stops(CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> bool:
            return global_step_value == 1

    held = Held(tmp_path, save_steps=1, listeners=[Stops()])
    async with held.session:
        await held.hold_the_write_of_the_next_step()
        assert not held.session.should_stop()
        held.latch.open()
        await held.hook.checkpointer.writer.wait_idle()
        assert held.session.should_stop()
        assert "a CheckpointSaverListener asked for it" in str(held.session.stop_reason)
