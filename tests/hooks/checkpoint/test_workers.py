"""CheckpointSaverHook on step functions: workers that share a model, and lost sessions."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    DamagedCheckpointError,
    MonitoredSession,
    SharedSessionCreator,
)

from ...support.helpers import in_task, settle
from ...support.moments import HeldStep, at, lost
from ..savers import (
    CopyingSaver,
    Counter,
    Fragile,
    Held,
    PlainSaver,
    saved,
    until,
)

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
    cell, other_runs, may_fail = Fragile(), anyio.Event(), anyio.Event()

    async def step(is_other: bool = False) -> dict[str, float]:
        if is_other and not may_fail.is_set():
            other_runs.set()
            await may_fail.wait()
            cell.is_lost = True
        return cell.step()

    creator = SharedSessionCreator(step, num_workers=2)
    hooks = [at(after_run=lambda *_: may_fail.set()), Held(tmp_path, PlainSaver, cell=cell).hook]
    async with (
        MonitoredSession(hooks, creator) as session,
        MonitoredSession([], creator) as other,
        anyio.create_task_group() as group,
    ):
        group.start_soon(other.run, [], {"is_other": True})
        await other_runs.wait()
        for _ in range(2):
            await session.run([])
    found = saved(tmp_path)
    assert len(found) >= 2
    assert found == {step: str(step) for step in found}
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
    held, slow, losses = Held(tmp_path, PlainSaver), HeldStep(), [lost()]

    def step(is_slow: bool = False) -> dict[str, float]:
        if is_slow:
            slow()
        return held.cell.step()

    def lose(*_: Any) -> None:
        if losses:
            raise losses.pop()

    creator = SharedSessionCreator(step, num_workers=2)
    async with (
        MonitoredSession([held.hook], creator, step_runner="thread") as a,
        MonitoredSession([at(before_run=lose)], creator, step_runner="thread") as b,
        anyio.create_task_group() as group,
    ):
        group.start_soon(a.run, [], {"is_slow": True})
        await slow.has_begun()
        group.start_soon(b.run, [])
        await until(lambda: a.global_step.statistics().tasks_waiting_for_ticket == 1)
        assert "restore" not in "".join(held.saver.log)
        slow.may_end.set()
    assert sum("restore" in each for each in held.saver.log) == 1
    assert held.cell.value == a.global_step.value
