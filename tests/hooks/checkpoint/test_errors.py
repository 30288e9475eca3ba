"""CheckpointSaverHook on step functions: saves that fail, and where their errors leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    StopTraining,
)

from ...support.helpers import Box, settle
from ..savers import Cell, CopyingSaver, PlainSaver, saved, threads_left
from .test_background import Held

pytestmark = pytest.mark.anyio

FULL = "no space"


def failing(path: Path, *errors: BaseException | None, **options: Any) -> Held:
    held = Held(path, **options)
    held.saver.errors = list(errors)
    return held


async def failed_write(held: Held) -> None:
    """Have a write begin, then fail, while no run is under way."""
    await held.hold_the_write_of_the_next_step()
    held.latch.open()
    await held.hook.checkpointer.writer.wait_idle()


async def check_that_training_goes_on(path: Path, begins_at: int) -> None:
    held = Held(path)
    async with held.session:
        assert held.cell.value == held.session.global_step.value == begins_at
        await held.run(1)
    assert saved(path)[begins_at + 1] == str(begins_at + 1)


async def test_it_stops_training_and_leaves_the_end_as_itself_once(tmp_path: Path) -> None:
    error = ZeroDivisionError("in a write")
    held = failing(tmp_path, None, error)
    with pytest.raises(ZeroDivisionError) as caught:
        async with held.session:
            await failed_write(held)
            assert held.session.should_stop()
            reason = held.session.stop_reason
            assert reason is not None
            assert (reason.who, reason.error) == ("CheckpointSaverHook", error)
            await held.run(1)  # ends the block
    assert caught.value is error
    notes = caught.value.__notes__
    assert "in a checkpoint that was written in the background" in notes
    assert "in end of CheckpointSaverHook" in notes
    assert not any("then, in" in note for note in notes)
    assert held.cell.value == 1
    assert saved(tmp_path) == {0: "0", 1: "1"}  # the end has tried again
    await check_that_training_goes_on(tmp_path, 1)


async def test_it_leaves_at_the_end_when_no_run_follows(tmp_path: Path) -> None:
    held = failing(tmp_path, None, OSError(28, FULL))
    with pytest.raises(CheckpointError, match="step 1 is not saved") as caught:
        async with held.session:
            await failed_write(held)
    assert "in end of CheckpointSaverHook" in caught.value.__notes__
    assert saved(tmp_path) == {0: "0", 1: "1"}  # the end has tried again
    await check_that_training_goes_on(tmp_path, 1)


async def test_the_save_at_creation_stops_training_too(tmp_path: Path) -> None:
    held = failing(tmp_path, ZeroDivisionError("at once"))
    with pytest.raises(ZeroDivisionError, match="at once"):
        async with held.session:
            await held.hook.checkpointer.writer.wait_idle()
            assert held.session.should_stop()
            await held.run(1)
    assert held.cell.value == 0
    assert saved(tmp_path) == {0: "0"}


async def test_waits_for_a_step_and_foreign_waits_end_when_a_write_fails(tmp_path: Path) -> None:
    held = failing(tmp_path, None, ZeroDivisionError("in a write"))
    box = [Box(), Box()]

    async def wait(fn: Any, *args: Any, box: Box) -> None:
        try:
            await fn(*args)
        except StopTraining as error:
            box.error = error

    with pytest.raises(ZeroDivisionError):
        async with held.session as session:
            await held.hold_the_write_of_the_next_step()
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: wait(session.global_step.wait_for, 99, box=box[0]))
                group.start_soon(lambda: wait(session.or_stop, anyio.sleep_forever, box=box[1]))
                await settle()
                held.latch.open()
    assert all(isinstance(each.error, StopTraining) for each in box)


async def test_an_error_of_the_body_leaves_and_the_saves_is_a_note(tmp_path: Path) -> None:
    held = failing(tmp_path, None, ZeroDivisionError("in a write"))
    with pytest.raises(KeyError, match="mine") as caught:
        async with held.session:
            await held.hold_the_write_of_the_next_step()
            held.latch.open()
            raise KeyError("mine")
    notes = [note for note in caught.value.__notes__ if "ZeroDivisionError('in a write')" in note]
    assert notes == ["then, in on_error of CheckpointSaverHook: ZeroDivisionError('in a write')"]
    await check_that_training_goes_on(tmp_path, 0)


async def test_an_error_of_a_later_hooks_end_leaves_after_the_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(SessionRunHook):
        async def end(self, session: Any) -> None:
            raise KeyError("mine")

    for place, expected in ((0, KeyError), (1, ZeroDivisionError)):
        path, cell = tmp_path / str(place), Cell()
        saver = CopyingSaver(cell, None, ZeroDivisionError("in a write"))
        hook = CheckpointSaverHook(path, save_steps=9, saver=saver, background=True)
        hooks = [hook, Fails()] if place else [Fails(), hook]
        with pytest.raises(expected) as caught:
            async with MonitoredSession(hooks, FunctionSessionCreator(cell.step)) as session:
                await session.run([])
        other = KeyError("mine") if place else ZeroDivisionError("in a write")
        said = [*caught.value.__notes__, *(each.getMessage() for each in caplog.records)]
        assert len([each for each in said if "then, in end of" in each]) == 1
        assert repr(other) in next(each for each in said if "then, in end of" in each)
        caplog.clear()
        await check_that_training_goes_on(path, 0)


@pytest.mark.parametrize("background", [False, True])
async def test_an_error_in_the_copy_leaves_the_run_and_the_save_is_due_again(
    background: bool, tmp_path: Path
) -> None:
    errors: list[BaseException | None] = [None, ZeroDivisionError("in a copy")]
    held = Held(tmp_path, save_steps=2, background=background)
    copy = held.saver.snapshot  # type: ignore[attr-defined]

    def snapshot() -> Any:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        return copy()

    held.saver.snapshot = snapshot  # type: ignore[attr-defined]
    async with held.session:
        await held.run(1)
        with pytest.raises(ZeroDivisionError, match="in a copy") as caught:
            await held.run(1)
        assert "in after_run of CheckpointSaverHook" in caught.value.__notes__
        assert not held.session.should_stop()
        await held.run(1)
    assert saved(tmp_path) == {0: "0", 3: "3"}


async def test_an_error_in_a_plain_save_is_due_again_and_else_made_good_at_the_end(
    tmp_path: Path,
) -> None:
    for num_more, steps in ((0, [0, 2]), (1, [0, 3])):
        path = tmp_path / str(num_more)
        held = failing(path, None, ZeroDivisionError("in a save"), saver=PlainSaver, save_steps=2)
        async with held.session:
            await held.run(1)
            with pytest.raises(ZeroDivisionError, match="in a save"):
                await held.run(1)
            await held.run(num_more)
        assert sorted(saved(path)) == steps


@pytest.mark.parametrize("background", [False, True])
async def test_a_step_whose_write_failed_is_made_good_at_the_end_once_the_error_was_seen(
    background: bool, tmp_path: Path
) -> None:
    held = failing(tmp_path, None, ZeroDivisionError("in a write"), background=background)

    class WaitsForTheWrite(SessionRunHook):
        """So that it fails while a run is under way: afterwards none begins."""

        async def before_run(self, run_context: SessionRunContext) -> None:
            await held.hook.checkpointer.writer.wait_idle()

    hooks = [WaitsForTheWrite(), held.hook]
    held.session = MonitoredSession(hooks, FunctionSessionCreator(held.cell.step))
    async with held.session:
        with pytest.raises(ZeroDivisionError, match="in a write"):
            await held.run(2)
    assert saved(tmp_path) == {0: "0", 1: "1"}


async def test_a_write_that_the_run_waited_for_is_not_called_one_in_the_background(
    tmp_path: Path,
) -> None:
    held = failing(tmp_path, None, ZeroDivisionError("in a write"), background=False)
    async with held.session:
        with pytest.raises(ZeroDivisionError) as caught:
            await held.run(1)
        assert not any("in the background" in note for note in caught.value.__notes__)
        assert not held.session.should_stop()


@pytest.mark.parametrize("background", [False, True])
async def test_an_error_in_restore_names_the_checkpoint_and_changes_nothing(
    background: bool, tmp_path: Path
) -> None:
    async with Held(tmp_path).session:
        pass
    held = Held(tmp_path, background=background)

    def restore(path: str) -> None:
        raise ZeroDivisionError("in a restore")

    held.saver.restore = restore  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError) as caught:
        await held.session.__aenter__()
    assert any(str(tmp_path / "model.ckpt-0") in note for note in caught.value.__notes__)
    assert saved(tmp_path) == {0: "0"}
    assert threads_left() == []
    await check_that_training_goes_on(tmp_path, 0)


async def test_an_error_in_a_hooks_state_dict_names_that_hook(tmp_path: Path) -> None:
    class Broken(SessionRunHook):
        def state_dict(self) -> dict[str, Any]:
            raise ZeroDivisionError("in a state_dict")

    cell = Cell()
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=PlainSaver(cell))
    session = MonitoredSession([hook, Broken()], FunctionSessionCreator(cell.step))
    with pytest.raises(ZeroDivisionError, match="in a state_dict") as caught:
        await session.__aenter__()
    assert "Broken" in f"{caught.value}{caught.value.__notes__}"
