"""Checkpointer, through its hook: saves beside training, their errors, cancellations and ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    CheckpointSaverListener,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StopTraining,
    WhenBusy,
)

from ...checkpoints.stores import run_python
from ...support.helpers import settle
from ...support.threads import threads_left
from ..preemptions import At
from ..savers import (
    Cell,
    CopyingSaver,
    Counter,
    Held,
    Latch,
    PlainSaver,
    check_that_training_goes_on,
    happened,
    is_free,
    saved,
    session_on,
    until,
)

pytestmark = pytest.mark.anyio
BACKGROUND = pytest.mark.parametrize("background", [False, True])


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


@pytest.mark.parametrize(
    ("save_steps", "runs", "written"),
    [
        (2, (1, 2, 3), [0, 2, 6, 7]),  # not 4; the next is counted from there
        (1, (0, 2, 0), [0, 1, 3]),  # the end is saved all the same
    ],
)
async def test_what_is_due_while_an_earlier_one_is_written_may_be_left_out(
    save_steps: int, runs: tuple[int, int, int], written: list[int], tmp_path: Path
) -> None:
    held = Held(tmp_path, save_steps=save_steps, when_busy=WhenBusy.SKIP)
    before, meanwhile, after = runs
    async with held.session:
        await held.run(before)
        await held.hold_the_write_of_the_next_step()
        await held.run(meanwhile)
        assert held.cell.value == before + 1 + meanwhile
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


SAVERS = pytest.mark.parametrize(
    ("saver", "background"), [(PlainSaver, False), (CopyingSaver, False), (CopyingSaver, True)]
)


@SAVERS
async def test_the_end_waits_for_a_save_beside_it(
    saver: type[PlainSaver], background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, saver, background=background, save_steps=9)
    async with held.session, anyio.create_task_group() as group:
        await held.run(1)
        await held.wait_idle()
        held.latch.close()
        for _ in range(2):  # the second is in line when the end comes
            group.start_soon(partial(held.hook.checkpointer.save_beside, timeout=9))
        await held.latch.wait_for_arrival()
        group.start_soon(held.session.close)
        await settle()
        held.latch.open()
    assert saved(tmp_path) == {0: "0", 1: "1"}
    assert held.written() == [0, 1]
    assert threads_left() == []
    assert is_free(tmp_path)


async def test_an_end_without_patience_frees_the_directory_when_the_save_beside_it_ends(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path, save_steps=9, background=False)
    session = session_on(held.cell, held.hook, stop_grace_period_secs=0)
    async with anyio.create_task_group() as group:
        with pytest.raises(KeyError, match="mine"):
            async with session:
                await session.run([])
                held.latch.close()
                group.start_soon(partial(held.hook.checkpointer.save_beside, timeout=9))
                await held.latch.wait_for_arrival()
                raise KeyError("mine")
        assert not is_free(tmp_path)
        held.latch.open()
    await until(lambda: is_free(tmp_path))
    assert saved(tmp_path) == {0: "0", 1: "1"}


@SAVERS
async def test_a_step_that_is_saved_is_not_saved_again_beside(
    saver: type[PlainSaver], background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, saver, background=background, save_steps=2)
    async with held.session:
        for _ in range(3):
            await held.run(1)
            for _ in range(2):
                await held.hook.checkpointer.save_beside(timeout=9)
    assert held.written() == [0, 1, 2, 3]


async def test_before_the_creation_and_after_the_end_nothing_is_saved_beside(
    tmp_path: Path,
) -> None:
    async def save_early() -> None:
        await held.hook.checkpointer.save_beside(timeout=0.0)
        assert saved(tmp_path) == {}

    early = At(after_create_session=save_early)
    held = Held(tmp_path, PlainSaver, before=[early], background=False, save_steps=9)
    async with held.session:
        assert saved(tmp_path) == {0: "0"}
        await held.run(1)
        held.cell.value = 5
    held.cell.value = 7
    await held.hook.checkpointer.save_beside(timeout=0.0)
    assert saved(tmp_path) == {0: "0", 1: "5"}
    assert is_free(tmp_path)


async def test_after_an_error_a_step_that_is_not_saved_stays_so(tmp_path: Path) -> None:
    held = Held(tmp_path, PlainSaver, save_steps=9)
    with pytest.raises(KeyError, match="mine"):
        async with held.session:
            await held.run(1)
            raise KeyError("mine")
    await held.hook.checkpointer.save_beside(timeout=0.0)
    assert held.written() == [0]


class CountsItsEnd(Counter):
    """Its state is another after its end."""

    async def end(self, session: Any) -> None:
        self.runs += 100


async def test_beside_the_end_the_hooks_are_saved_as_the_last_run_left_them(
    tmp_path: Path,
) -> None:
    async def save_late() -> None:
        await held.hook.checkpointer.save_beside(timeout=9)

    for _ in range(2):
        counter, saves = CountsItsEnd(), At(end=save_late)
        held = Held(tmp_path, PlainSaver, before=[counter, saves], background=False, save_steps=9)
        async with held.session:
            assert counter.runs == held.cell.value
            await held.run(1)


async def failed_write(held: Held) -> None:
    """Have a write begin, then fail, while no run is under way."""
    await held.hold_the_write_of_the_next_step()
    held.latch.open()
    await held.wait_idle()


IN_A_WRITE = "in a write"


async def test_it_stops_training_and_leaves_the_end_as_itself_once(tmp_path: Path) -> None:
    error = ZeroDivisionError(IN_A_WRITE)
    held = Held(tmp_path, errors=[None, error])
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


async def test_of_two_writes_that_fail_the_first_error_leaves_and_the_other_is_a_note(
    tmp_path: Path,
) -> None:
    errors = [ZeroDivisionError(IN_A_WRITE), ZeroDivisionError("in the next one")]
    held = Held(tmp_path, errors=[None, *errors])
    with pytest.raises(ZeroDivisionError) as caught:
        async with held.session:
            await failed_write(held)
    assert caught.value is errors[0]
    assert f"then, writing the next one: {errors[1]!r}" in caught.value.__notes__
    assert saved(tmp_path) == {0: "0"}


EXIT = """
import sys
from pathlib import Path
import anyio
from asynchooks import CheckpointSaverHook, MonitoredSession

class Saver:
    def save(self, path):
        self.snapshot()(path)
    def restore(self, path):
        pass
    def snapshot(self):
        return self.write
    def write(self, path):
        if path.endswith("-2"):
            raise SystemExit(3)
        Path(path).touch()

async def main():
    hook = CheckpointSaverHook(sys.argv[2], save_steps=1, saver=Saver(), background=True)
    async with MonitoredSession([hook], lambda: {}) as session:
        while not session.should_stop():
            await session.run([])
            await hook.checkpointer.wait_idle()

try:
    anyio.run(main, backend=sys.argv[1])
except SystemExit as error:
    print("raised", repr(error), error.__notes__)
"""


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_exit_in_a_write_leaves_the_session(tmp_path: Path, backend: str) -> None:
    said = run_python(EXIT, backend, tmp_path)
    assert said.startswith("raised SystemExit(3)")
    assert "in a checkpoint that was written in the background" in said


async def test_it_leaves_at_the_end_when_no_run_follows(tmp_path: Path) -> None:
    held = Held(tmp_path, errors=[None, OSError(28, "no space")])
    with pytest.raises(CheckpointError, match="step 1 is not saved") as caught:
        async with held.session:
            await failed_write(held)
    assert "in end of CheckpointSaverHook" in caught.value.__notes__
    assert saved(tmp_path) == {0: "0", 1: "1"}  # the end has tried again
    await check_that_training_goes_on(tmp_path, 1)


async def test_the_save_at_creation_stops_training_too(tmp_path: Path) -> None:
    held = Held(tmp_path, errors=[ZeroDivisionError("at once")])
    with pytest.raises(ZeroDivisionError, match="at once"):
        async with held.session:
            await held.wait_idle()
            assert held.session.should_stop()
            await held.run(1)
    assert held.cell.value == 0
    assert saved(tmp_path) == {0: "0"}


async def test_waits_for_a_step_and_foreign_waits_end_when_a_write_fails(tmp_path: Path) -> None:
    held = Held(tmp_path, errors=[None, ZeroDivisionError(IN_A_WRITE)])
    stopped: list[object] = []

    async def wait(fn: Any, *args: Any) -> None:
        with pytest.raises(StopTraining):
            await fn(*args)
        stopped.append(fn)

    with pytest.raises(ZeroDivisionError):
        async with held.session as session:
            await held.hold_the_write_of_the_next_step()
            async with anyio.create_task_group() as group:
                group.start_soon(wait, session.global_step.wait_for, 99)
                group.start_soon(wait, session.or_stop, anyio.sleep_forever)
                await settle()
                held.latch.open()
    assert len(stopped) == 2


async def test_an_error_of_the_body_leaves_and_the_saves_is_a_note(tmp_path: Path) -> None:
    held = Held(tmp_path, errors=[None, ZeroDivisionError(IN_A_WRITE)])
    with pytest.raises(KeyError, match="mine") as caught:
        async with held.session:
            await held.hold_the_write_of_the_next_step()
            held.latch.open()
            raise KeyError("mine")
    notes = [note for note in caught.value.__notes__ if "ZeroDivisionError('in a write')" in note]
    assert notes == ["then, in on_error of CheckpointSaverHook: ZeroDivisionError('in a write')"]
    await check_that_training_goes_on(tmp_path, 0)


@pytest.mark.parametrize(
    ("place", "leaves", "noted"),
    [("before", KeyError, IN_A_WRITE), ("after", ZeroDivisionError, "mine")],
)
async def test_of_two_errors_at_the_end_the_first_leaves_and_the_other_is_a_note(
    place: str, leaves: type[Exception], noted: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail() -> None:
        raise KeyError("mine")

    errors, others = [None, ZeroDivisionError(IN_A_WRITE)], {place: [At(end=fail)]}
    held = Held(tmp_path, save_steps=9, errors=errors, **others)  # type: ignore[arg-type]
    with pytest.raises(leaves) as caught:
        async with held.session:
            await held.run(1)
    said = [*caught.value.__notes__, *(each.getMessage() for each in caplog.records)]
    [said_of_other] = [each for each in said if "then, in end of" in each]
    assert f"Error('{noted}')" in said_of_other
    caplog.clear()
    await check_that_training_goes_on(tmp_path, 0)


@BACKGROUND
async def test_an_error_in_the_copy_leaves_the_run_and_the_save_is_due_again(
    background: bool, tmp_path: Path
) -> None:
    errors: list[BaseException | None] = [None, ZeroDivisionError("in a copy")]
    held = Held(tmp_path, save_steps=2, background=background)
    copy = held.saver.snapshot

    def snapshot() -> Any:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        return copy()

    held.saver.snapshot = snapshot
    async with held.session:
        await held.run(1)
        with pytest.raises(ZeroDivisionError, match="in a copy") as caught:
            await held.run(1)
        assert "in after_run of CheckpointSaverHook" in caught.value.__notes__
        assert not held.session.should_stop()
        await held.run(1)
    assert saved(tmp_path) == {0: "0", 3: "3"}


@pytest.mark.parametrize(("num_more", "steps"), [(0, [0, 2]), (1, [0, 3])])
async def test_an_error_in_a_plain_save_is_due_again_and_else_made_good_at_the_end(
    num_more: int, steps: list[int], tmp_path: Path
) -> None:
    errors = [None, ZeroDivisionError("in a save")]
    held = Held(tmp_path, PlainSaver, errors=errors, save_steps=2)
    async with held.session:
        await held.run(1)
        with pytest.raises(ZeroDivisionError, match="in a save"):
            await held.run(1)
        await held.run(num_more)
    assert sorted(saved(tmp_path)) == steps


@BACKGROUND
async def test_a_step_whose_write_failed_is_made_good_at_the_end_once_the_error_was_seen(
    background: bool, tmp_path: Path
) -> None:
    # so that it fails while a run is under way: afterwards none begins
    waits = At(before_run=lambda: held.wait_idle())
    errors = [None, ZeroDivisionError(IN_A_WRITE)]
    held = Held(tmp_path, errors=errors, before=[waits], background=background)
    async with held.session:
        with pytest.raises(ZeroDivisionError, match="in a write"):
            await held.run(2)
    assert saved(tmp_path) == {0: "0", 1: "1"}


async def test_a_write_that_the_run_waited_for_is_not_called_one_in_the_background(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path, errors=[None, ZeroDivisionError(IN_A_WRITE)], background=False)
    async with held.session:
        with pytest.raises(ZeroDivisionError) as caught:
            await held.run(1)
        assert not any("in the background" in note for note in caught.value.__notes__)
        assert not held.session.should_stop()


@BACKGROUND
async def test_an_error_in_restore_names_the_checkpoint_and_changes_nothing(
    background: bool, tmp_path: Path
) -> None:
    async with Held(tmp_path).session:
        pass
    held = Held(tmp_path, background=background)

    def restore(path: str) -> None:
        raise ZeroDivisionError("in a restore")

    held.saver.restore = restore
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

    held = Held(tmp_path, PlainSaver, after=[Broken()], background=False)
    with pytest.raises(ZeroDivisionError, match="in a state_dict") as caught:
        await held.session.__aenter__()
    assert "Broken" in f"{caught.value}{caught.value.__notes__}"


class Seen(CopyingSaver):
    """Sets an event when its write is over."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.is_over = threading.Event()

    def _write(self, path: str, value: int) -> None:
        try:
            super()._write(path, value)
        finally:
            self.is_over.set()


async def test_the_directory_is_given_back_no_sooner_than_the_write_has_ended(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path, Seen)
    held.latch.close()
    try:
        with pytest.raises(KeyError):
            async with session_on(held.cell, held.hook, stop_grace_period_secs=0.05):
                await held.latch.wait_for_arrival()
                raise KeyError
        assert not is_free(tmp_path)
    finally:
        held.latch.open()
        await happened(held.saver.is_over)
        await held.wait_idle()
    assert saved(tmp_path) == {0: "0"}


@pytest.mark.parametrize("leaving", [SystemExit(3), GeneratorExit()])
async def test_the_gate_is_open_after_an_exit_in_the_copy(
    leaving: BaseException, tmp_path: Path
) -> None:
    held = Held(tmp_path, background=False)
    async with held.session as session:

        def snapshot() -> Any:
            raise leaving

        with pytest.raises(type(leaving)):
            held.saver.snapshot = snapshot
            await held.run(1)
        del held.saver.snapshot
        is_exclusive = session.global_step.statistics().is_exclusive
        session.global_step.gate.exclusive = None  # else the end hangs
    assert not is_exclusive


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

    @asynccontextmanager
    async def other(self) -> AsyncIterator[tuple[MonitoredSession, Any]]:
        """The other worker's session, and a group; after the block nothing is locked.

        So the other worker runs, and another run may save there.
        """
        async with MonitoredSession([], self.shared, step_runner="thread") as session:
            async with anyio.create_task_group() as group:
                yield session, group
            value = self.cell.value
            assert not session.global_step.statistics().is_exclusive
            with anyio.fail_after(20):
                assert await session.run("value") == value + 1
            assert is_free(self.path)
            assert [name for name in threads_left() if "step" not in name] == []
        assert self.scope.cancelled_caught


def num_in_line(session: MonitoredSession) -> int:
    return session.global_step.statistics().tasks_waiting_for_ticket


@pytest.mark.parametrize("what", ["restore", "save"])
async def test_a_cancellation_while_it_waits_for_a_run_under_way(what: str, tmp_path: Path) -> None:
    two = Two(tmp_path, CopyingSaver)
    async with two.other() as (session, group):
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


@pytest.mark.parametrize(
    ("saver", "background"), [(SlowCopy, False), (SlowCopy, True), (PlainSaver, False)]
)
async def test_a_cancellation_while_the_copy_is_made_or_a_saver_without_copies_writes(
    saver: type[PlainSaver], background: bool, tmp_path: Path
) -> None:
    two = Two(tmp_path, saver, background=background)
    latch: Latch = two.saver.copies if saver is SlowCopy else two.saver.latch
    async with two.other() as (session, group):
        latch.close()
        group.start_soon(two.work, 1)
        await latch.wait_for_arrival()
        assert session.global_step.statistics().is_exclusive
        await two.cancel(latch)
        if saver is PlainSaver:
            assert saved(tmp_path) == {0: "0"}, "what is under way is completed"
        assert two.cell.value == 0


@BACKGROUND
@pytest.mark.parametrize("num_runs", [1, 0])
async def test_a_cancellation_while_it_waits_for_a_write(
    num_runs: int, background: bool, tmp_path: Path
) -> None:
    two = Two(tmp_path, CopyingSaver, background=background, when_busy=WhenBusy.WAIT)
    async with two.other() as (_, group):
        two.saver.latch.close()
        group.start_soon(two.work, num_runs)
        await two.saver.latch.wait_for_arrival()
        await settle()
        await two.cancel(two.saver.latch)
        assert saved(tmp_path) == {0: "0"}


@BACKGROUND
async def test_a_cancellation_while_the_last_save_is_written(
    background: bool, tmp_path: Path
) -> None:
    two = Two(tmp_path, CopyingSaver, background=background, save_steps=9)
    async with two.other() as (_, group):
        group.start_soon(two.work, 2, two.may_run.wait)
        await until(lambda: saved(tmp_path) == {0: "0"})
        two.saver.latch.close()
        two.may_run.set()
        await two.saver.latch.wait_for_arrival()
        assert two.cell.value == 2
        await two.cancel(two.saver.latch)
        assert saved(tmp_path) == {0: "0", 2: "2"}
        assert two.cell.value == 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_native_cancellation_twice_leaves_the_write_to_its_end(tmp_path: Path) -> None:
    held = Held(tmp_path)
    held.latch.close()

    async def work() -> None:
        async with held.session:
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await held.latch.wait_for_arrival()
    task.cancel()
    await settle()
    held.latch.open()
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
