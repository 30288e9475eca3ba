"""CheckpointSaverHook on step functions: a lost session goes on from the newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from asynchooks import (
    CheckpointSaverHook,
    DamagedCheckpointError,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    SharedSessionCreator,
)

from ...support.helpers import settle
from ..savers import Cell, CopyingSaver, Counter, PlainSaver, saved, until

pytestmark = pytest.mark.anyio

LOST = PreemptionError("the machine went away")


class Fragile(Cell):
    """A cell whose steps are lost on request; what they changed until then stays changed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False

    def step(self) -> dict[str, float]:
        outputs = super().step()
        if self.is_lost:
            self.is_lost = False
            self.value += 1000
            raise LOST
        return outputs


@pytest.mark.parametrize("saver", [PlainSaver, CopyingSaver])
@pytest.mark.parametrize("background", [False, True])
async def test_model_step_and_hooks_go_back_and_nothing_is_saved_again(
    saver: type[PlainSaver], background: bool, tmp_path: Path
) -> None:
    cell = Fragile()
    store, hooks = saver(cell), [Counter(), Counter()]
    hook = CheckpointSaverHook(tmp_path, save_steps=3, saver=store, background=background)
    creator = FunctionSessionCreator(cell.step)
    async with MonitoredSession([hooks[0], hook, hooks[1]], creator) as session:
        for _ in range(5):
            await session.run([])
        cell.is_lost = True
        assert await session.run("value") == 4
        assert (session.global_step.value, session.global_step.epoch) == (4, 1)
        assert [each.runs for each in hooks] == [4, 4]
        for _ in range(3):
            await session.run([])
    assert [line for line in store.log if "begin" not in line] == [
        "end 0", "end 3", "restore 3", "end 6", "end 7",
    ]  # fmt: skip
    assert saved(tmp_path) == {step: str(step) for step in (0, 3, 6, 7)}


async def test_a_write_under_way_is_waited_for_and_is_the_newest(tmp_path: Path) -> None:
    cell = Fragile()
    saver = CopyingSaver(cell)
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=saver, background=True)
    async with MonitoredSession([hook], FunctionSessionCreator(cell.step)) as session:
        await session.run([])
        await hook.checkpointer.writer.wait_idle()
        saver.latch.close()
        await session.run([])
        await saver.latch.wait_for_arrival()
        await session.run([])
        cell.is_lost = True
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, [])
            await until(lambda: cell.value > 1000)
            await settle()
            assert "restore" not in "".join(saver.log)
            saver.latch.open()
        assert saver.log[-2:] == ["end 2", "restore 2"]
        assert cell.value == session.global_step.value == 3


async def test_a_write_that_fails_leaves_the_older_one_and_its_error_leaves_once(
    tmp_path: Path,
) -> None:
    cell = Fragile()
    saver = CopyingSaver(cell, None, ZeroDivisionError("in a write"))
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=saver, background=True)
    errors: list[Exception] = []

    async def run(session: MonitoredSession) -> None:
        try:
            await session.run([])
        except Exception as error:
            errors.append(error)

    async with MonitoredSession([hook], FunctionSessionCreator(cell.step)) as session:
        await session.run([])
        await hook.checkpointer.writer.wait_idle()
        saver.latch.close()
        await session.run([])
        await saver.latch.wait_for_arrival()
        cell.is_lost = True
        async with anyio.create_task_group() as group:
            group.start_soon(run, session)
            await until(lambda: cell.value > 1000)
            saver.latch.open()
    assert [str(error) for error in errors] == ["in a write"]
    assert "restore 0" in saver.log


@pytest.mark.parametrize("first", ["with the hook", "without"])
async def test_it_is_restored_once_for_all_workers_by_the_first_to_notice(
    first: str, tmp_path: Path
) -> None:
    cell = Fragile()
    saver, counter = CopyingSaver(cell), Counter()
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=saver)
    shared = SharedSessionCreator(FunctionSessionCreator(cell.step), num_workers=3)
    async with (
        MonitoredSession([hook, counter], shared) as a,
        MonitoredSession([], shared) as b,
        MonitoredSession([], shared) as c,
    ):
        for session in (a, a, b, c):
            await session.run([])
        cell.is_lost = True
        assert await (a if first == "with the hook" else b).run("value") == 3
        assert saver.log.count("restore 2") == 1
        assert counter.runs == 2 + (first == "with the hook")
        values = [await each.run("value") for each in (c, b, a)]
        assert values == [4, 5, 6]
        assert a.global_step.epoch == 1
    assert saver.log.count("restore 2") == 1
    assert saved(tmp_path)[6] == "6"


async def test_a_damaged_checkpoint_leaves_as_itself_not_as_a_loss(tmp_path: Path) -> None:
    cell = Fragile()
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=CopyingSaver(cell))
    with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint"):
        async with MonitoredSession([hook], FunctionSessionCreator(cell.step)) as session:
            (tmp_path / "model.ckpt-0" / "model.ckpt-0").write_text("9")
            cell.is_lost = True
            await session.run([])
