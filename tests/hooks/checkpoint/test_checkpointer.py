"""Checkpointer, through its hook: saves beside training, their errors, cancellations and ends."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    MonitoredSession,
    SessionRunContext,
    SharedSessionCreator,
    WhenBusy,
)

from ...support.helpers import in_task, settle
from ...support.moments import at
from ...support.threads import threads_left
from ..savers import (
    BACKGROUND,
    Cell,
    CopyingSaver,
    Held,
    PlainSaver,
    SlowCopy,
    check_that_training_goes_on,
    is_free,
    saved,
    session_on,
    until,
)


@pytest.mark.parametrize(
    ("saver", "background"), [(PlainSaver, False), (PlainSaver, True), (CopyingSaver, False)]
)
async def test_without_background_or_a_copy_the_run_waits_for_the_write(
    saver: type[PlainSaver], background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, saver, background=background)
    async with held.session:
        held.latch.close()
        async with in_task(held.run, 2):
            await held.latch.wait_for_arrival()
            await settle()
            assert held.cell.value == 1
            held.latch.open()
    assert saved(tmp_path) == {0: "0", 1: "1", 2: "2"}


async def test_wait_holds_the_run_until_the_earlier_one_is_written(tmp_path: Path) -> None:
    held = Held(tmp_path, when_busy=WhenBusy.WAIT)
    async with held.session:
        await held.hold_the_write_of_the_next_step()
        async with in_task(held.run, 2):
            await until(lambda: held.cell.value == 2)
            await settle()
            assert (held.cell.value, held.written()) == (2, [0, 1])
            held.latch.open()
    assert held.written() == sorted(saved(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("save_steps", "runs", "written"),
    [
        (2, (1, 2, 3), [0, 2, 6, 7]),  # not 4; the next is counted from there
        (1, (0, 2, 0), [0, 1, 3]),  # the end is saved all the same
    ],
)
async def test_skip_leaves_out_what_is_due_while_an_earlier_one_is_written(
    save_steps: int, runs: tuple[int, int, int], written: list[int], tmp_path: Path
) -> None:
    held = Held(tmp_path, save_steps=save_steps, when_busy=WhenBusy.SKIP)
    before, meanwhile, after = runs
    async with held.session:
        await held.run(before)
        await held.hold_the_write_of_the_next_step()
        await held.run(meanwhile)
        held.latch.open()
        if after:
            await held.wait_idle()
            await held.run(after)
    assert held.written() == written
    assert saved(tmp_path) == {step: str(step) for step in written}


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
        async with in_task(held.session.close):
            assert log == ["saved 0 as [0]"]
            held.latch.open()
    assert log == ["saved 0 as [0]", "saved 1 as [0, 1]", "end at 1"]


@BACKGROUND
async def test_an_end_without_patience_frees_the_directory_when_the_save_under_way_ends(
    background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, save_steps=9, background=background)
    session = session_on(held.cell, held.hook, stop_grace_period_secs=0)
    async with anyio.create_task_group() as group:
        with pytest.raises(KeyError, match="mine"):
            async with session:
                await session.run([])
                await held.wait_idle()
                held.latch.close()
                group.start_soon(partial(held.hook.checkpointer.save_beside, timeout=9))
                await held.latch.wait_for_arrival()
                raise KeyError("mine")
        assert not is_free(tmp_path)
        held.latch.open()
    await until(lambda: is_free(tmp_path))
    assert saved(tmp_path) == {0: "0", 1: "1"}


@BACKGROUND
async def test_a_step_that_is_saved_is_not_saved_again_beside(
    background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, background=background, save_steps=2)
    async with held.session:
        for _ in range(3):
            await held.run(1)
            for _ in range(2):
                await held.hook.checkpointer.save_beside(timeout=9)
    assert held.written() == [0, 1, 2, 3]


# Errors


IN_A_WRITE = "in a write"


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
@pytest.mark.parametrize(("step", "num_runs"), [(0, 1), (1, 1), (1, 0)])
async def test_the_error_of_a_write_stops_training_and_leaves_the_end_as_itself_once(
    step: int, num_runs: int, kind: type[BaseException], tmp_path: Path
) -> None:
    error = kind(IN_A_WRITE)
    held = Held(tmp_path, errors=[*[None] * step, error])
    with pytest.raises(kind) as caught:
        async with held.session:
            if step:
                await held.hold_the_write_of_the_next_step()
                held.latch.open()
            await held.wait_idle()
            assert held.session.should_stop()
            reason = held.session.stop_reason
            assert reason is not None
            assert (reason.who, reason.error) == ("CheckpointSaverHook", error)
            await held.run(num_runs)  # ends the block
    assert caught.value is error
    notes = error.__notes__
    assert "in a checkpoint that was written in the background" in notes
    assert "in end of CheckpointSaverHook" in notes
    assert not any("then, in" in note for note in notes)
    assert held.cell.value == step
    assert sorted(saved(tmp_path)) == [*range(step + 1)], "the end has tried again"
    await check_that_training_goes_on(tmp_path, step)


async def test_an_error_of_the_body_leaves_and_the_saves_is_a_note(tmp_path: Path) -> None:
    held = Held(tmp_path, errors=[None, ZeroDivisionError(IN_A_WRITE)])
    with pytest.raises(KeyError, match="mine") as caught:
        async with held.session:
            await held.hold_the_write_of_the_next_step()
            held.latch.open()
            raise KeyError("mine")
    assert sum("ZeroDivisionError('in a write')" in each for each in caught.value.__notes__) == 1
    await check_that_training_goes_on(tmp_path, 0)


class FailsToCopy(CopyingSaver):
    """Of its errors, each copy and each write raises the next."""

    def snapshot(self) -> Callable[[str], None]:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return super().snapshot()


@pytest.mark.parametrize(
    ("saver", "background"), [(FailsToCopy, False), (FailsToCopy, True), (PlainSaver, False)]
)
@pytest.mark.parametrize(("num_more", "steps"), [(0, [0, 2]), (2, [0, 3, 4])])
async def test_a_save_that_fails_in_its_run_is_due_again_and_else_made_good_at_the_end(
    saver: type[PlainSaver], background: bool, num_more: int, steps: list[int], tmp_path: Path
) -> None:
    before = [None, None] if saver is FailsToCopy else [None]
    errors = [*before, ZeroDivisionError("in a save")]
    held = Held(tmp_path, saver, errors=errors, save_steps=2, background=background)
    async with held.session:
        await held.run(1)
        with pytest.raises(ZeroDivisionError, match="in a save") as caught:
            await held.run(1)
        assert "in after_run of CheckpointSaverHook" in caught.value.__notes__
        assert not held.session.should_stop()
        await held.run(num_more)
    assert saved(tmp_path) == {step: str(step) for step in steps}


@BACKGROUND
async def test_a_step_whose_write_failed_is_made_good_at_the_end_once_the_error_was_seen(
    background: bool, tmp_path: Path
) -> None:
    # so that it fails while a run is under way: afterwards none begins
    waits = at(before_run=lambda run_context: held.wait_idle())
    errors = [None, ZeroDivisionError(IN_A_WRITE)]
    held = Held(tmp_path, errors=errors, before=[waits], background=background)
    async with held.session:
        with pytest.raises(ZeroDivisionError, match=IN_A_WRITE) as caught:
            await held.run(2)
        is_called_so = any("in the background" in note for note in caught.value.__notes__)
        assert is_called_so == held.session.should_stop() == background
    assert saved(tmp_path) == {0: "0", 1: "1"}


async def test_the_error_of_a_write_is_not_taken_for_the_loss_of_a_session_that_was_replaced(
    tmp_path: Path,
) -> None:
    async def replace(run_context: SessionRunContext) -> None:
        await held.wait_idle()
        if held.session.should_stop():
            run_context.session.retire()  # as another worker does that shares it

    held = Held(tmp_path, errors=[None, KeyError(IN_A_WRITE)], before=[at(before_run=replace)])
    async with held.session:
        with pytest.raises(KeyError, match=IN_A_WRITE):
            await held.run(2)


async def test_an_error_in_restore_names_the_checkpoint_and_changes_nothing(tmp_path: Path) -> None:
    class Refuses(CopyingSaver):
        def restore(self, path: str) -> None:
            raise ZeroDivisionError("in a restore")

    async with Held(tmp_path).session:
        pass
    with pytest.raises(ZeroDivisionError) as caught:
        await Held(tmp_path, Refuses).session.open()
    assert any(str(tmp_path / "model.ckpt-0") in note for note in caught.value.__notes__)
    assert threads_left() == []
    await check_that_training_goes_on(tmp_path, 0)


# Cancellations


async def test_no_run_begins_while_a_thread_that_was_given_up_still_copies(tmp_path: Path) -> None:
    cell = Cell()
    saver = SlowCopy(cell)
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
    shared = SharedSessionCreator(cell.step, num_workers=2)
    options: Any = {"stop_grace_period_secs": 0}
    async with MonitoredSession([], shared, **options) as session:
        saver.copies.close()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(MonitoredSession([hook], shared, **options).open)
                await saver.copies.wait_for_arrival()
                scope.cancel()
        async with in_task(session.run, []):
            statistics = session.global_step.statistics
            await until(lambda: statistics().tasks_waiting_for_ticket == 1)
            await settle()
            assert (cell.value, statistics().is_exclusive) == (0, True)
            saver.copies.open()
        assert cell.value == 1
    await until(lambda: threads_left() == [])
