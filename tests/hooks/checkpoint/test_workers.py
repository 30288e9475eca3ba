"""CheckpointSaverHook on step functions: workers that share a model, and lost sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    DamagedCheckpointError,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Retention,
    SharedSessionCreator,
    StateDictSaver,
    WhenBusy,
)
from asynchooks.checkpoints import CheckpointDirectory

from ...support.helpers import in_task, settle
from ...support.moments import at
from ..savers import (
    Cell,
    CopyingSaver,
    Counter,
    Fragile,
    Held,
    Latch,
    PlainSaver,
    hasty_threads,
    saved,
    until,
)

pytestmark = pytest.mark.anyio


class Numbers:
    """Eight numbers, which each step moves by one, one after the other."""

    def __init__(self) -> None:
        self.weights = {"w": np.zeros(8, int)}

    def step(self) -> dict[str, int]:
        for place in range(8):
            self.weights["w"][place] += 1
        return {}

    def saver_hook(self, path: Path, **options: Any) -> CheckpointSaverHook:
        saver = StateDictSaver(weights=self.weights)
        return CheckpointSaverHook(path, save_steps=1, saver=saver, **options)


def check_saved(path: Path, num: int) -> None:
    """At least so many checkpoints, each of one step."""
    found = CheckpointDirectory(path).checkpoints()
    assert len(found) >= num
    for each in found:
        numbers = Numbers()
        StateDictSaver(weights=numbers.weights).restore(each.prefix)
        assert numbers.weights["w"].tolist() == [each.step] * 8


@pytest.mark.parametrize(
    ("background", "when_busy"),
    [(False, WhenBusy.WAIT), (True, WhenBusy.WAIT), (True, WhenBusy.SKIP)],
)
async def test_a_checkpoint_holds_one_step_while_workers_run_in_threads(
    background: bool, when_busy: WhenBusy, tmp_path: Path
) -> None:
    numbers = Numbers()
    hook = numbers.saver_hook(
        tmp_path, background=background, when_busy=when_busy, retention=Retention(max_to_keep=None)
    )
    shared = SharedSessionCreator(FunctionSessionCreator(numbers.step), num_workers=4)
    is_over = anyio.Event()

    async def work_beside() -> None:
        async with MonitoredSession([], shared, step_runner="thread") as session:
            while not is_over.is_set():
                await session.run([])

    with hasty_threads():
        async with anyio.create_task_group() as group:
            async with MonitoredSession([hook], shared, step_runner="thread") as session:
                for _ in range(3):
                    group.start_soon(work_beside)
                for _ in range(8):
                    await session.run([])
            is_over.set()
    check_saved(tmp_path, 9 if when_busy is WhenBusy.WAIT else 2)


# Lost sessions


@pytest.mark.parametrize(("saver", "background"), [(PlainSaver, False), (CopyingSaver, True)])
async def test_model_step_and_hooks_go_back_and_nothing_is_saved_again(
    saver: type[PlainSaver], background: bool, tmp_path: Path
) -> None:
    cell, counters = Fragile(), [Counter(), Counter()]
    held = Held(
        tmp_path, saver, cell=cell, before=counters[:1], after=counters[1:], save_steps=3,
        background=background,
    )  # fmt: skip
    async with held.session as session:
        await held.run(5)
        cell.is_lost = True
        assert await session.run("value") == 4
        assert (session.global_step.value, session.global_step.epoch) == (4, 1)
        assert [each.runs for each in counters] == [4, 4]
        await held.run(3)
    ended = [line for line in held.saver.log if "begin" not in line]
    assert ended == ["end 0", "end 3", "restore 3", "end 6", "end 7"]
    assert saved(tmp_path) == {step: str(step) for step in (0, 3, 6, 7)}


@pytest.mark.parametrize("fails", [False, True])
async def test_a_write_under_way_is_waited_for_and_is_the_newest_unless_it_fails(
    fails: bool, tmp_path: Path
) -> None:
    cell = Fragile()
    errors = [None, ZeroDivisionError("in a write") if fails else None]
    held = Held(tmp_path, cell=cell, errors=errors, save_steps=2)
    async with held.session:
        await held.run(1)
        await held.hold_the_write_of_the_next_step()
        cell.is_lost = True
        async with in_task(held.run, 1) as run:
            await until(lambda: cell.value > 1000)
            await settle()
            assert "restore" not in "".join(held.saver.log)
            held.latch.open()
    if fails:
        assert "restore 0" in held.saver.log
        assert str(run.error) == "in a write", "it leaves once"
    else:
        assert held.saver.log[4:6] == ["restore 2", "begin 3"]


async def test_a_model_that_was_lost_in_the_middle_of_a_step_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The save waits for the step of another worker, which then fails."""
    numbers, other_runs, may_fail = Numbers(), anyio.Event(), anyio.Event()

    async def step(is_other: bool = False) -> dict[str, int]:
        if is_other and not may_fail.is_set():
            other_runs.set()
            await may_fail.wait()
            numbers.weights["w"][0] += 1  # and no other
            raise PreemptionError("the machine is gone")
        return numbers.step()

    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=2)
    lets_fail = at(after_run=lambda *_: may_fail.set())
    async with (
        MonitoredSession([lets_fail, numbers.saver_hook(tmp_path)], creator) as session,
        MonitoredSession([], creator) as other,
        anyio.create_task_group() as group,
    ):
        group.start_soon(other.run, [], {"is_other": True})
        await other_runs.wait()
        for _ in range(2):
            await session.run([])
    check_saved(tmp_path, 2)
    assert "Step 1 is not saved: the session was lost" in caplog.text


async def test_a_damaged_checkpoint_leaves_as_itself_not_as_a_loss(tmp_path: Path) -> None:
    cell = Fragile()
    held = Held(tmp_path, cell=cell, background=False, save_steps=2)
    with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint"):
        async with held.session:
            (tmp_path / "model.ckpt-0" / "model.ckpt-0").write_text("9")
            cell.is_lost = True
            await held.run(1)


async def test_nothing_is_restored_while_another_worker_steps(tmp_path: Path) -> None:
    cell, may_end, is_lost = Cell(), Latch(), False
    saver = PlainSaver(cell)

    def step(is_slow: bool = False) -> dict[str, float]:
        if is_slow:
            may_end.pass_by()
        return cell.step()

    def lose(*_: Any) -> None:
        nonlocal is_lost
        if not is_lost:
            is_lost = True
            raise PreemptionError("the machine went away")

    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
    shared = SharedSessionCreator(FunctionSessionCreator(step), num_workers=2)
    async with (
        MonitoredSession([hook], shared, step_runner="thread") as a,
        MonitoredSession([at(before_run=lose)], shared, step_runner="thread") as b,
    ):
        may_end.close()
        async with anyio.create_task_group() as group:
            group.start_soon(a.run, [], {"is_slow": True})
            await may_end.wait_for_arrival()
            group.start_soon(b.run, [])
            await until(lambda: a.global_step.statistics().tasks_waiting_for_ticket == 1)
            assert "restore" not in "".join(saver.log)
            may_end.open()
        assert is_lost
        assert sum("restore" in each for each in saver.log) == 1
        assert cell.value == a.global_step.value
