"""CheckpointSaverHook on step functions: workers that share a model, and lost sessions."""

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
    DamagedCheckpointError,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Retention,
    SharedSessionCreator,
    WhenBusy,
)

from ...support.helpers import settle
from ..savers import (
    Cell,
    CopyingSaver,
    Counter,
    Fragile,
    Held,
    Latch,
    PlainSaver,
    saved,
    until,
)
from ..training import Calls

pytestmark = pytest.mark.anyio


class Numbers:
    """Several numbers, which each step moves by one, one after the other; and their saver."""

    def __init__(self) -> None:
        self.values = [0] * 8
        self._locks = [threading.Lock() for _ in self.values]

    def step(self) -> dict[str, int]:
        for place, lock in enumerate(self._locks):
            with lock:
                self.values[place] += 1
        return {}

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps([self.values[place] for place in range(8)]))

    def restore(self, path: str) -> None:
        self.values[:] = json.loads(Path(path).read_text())


class CopiedNumbers(Numbers):
    def snapshot(self) -> Callable[[str], Any]:
        copy = Numbers()
        for place in range(8):
            copy.values[place] = self.values[place]
        return copy.save


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize(
    ("numbers_of", "background", "when_busy"),
    [
        (Numbers, False, WhenBusy.WAIT),
        (CopiedNumbers, True, WhenBusy.WAIT),
        (CopiedNumbers, True, WhenBusy.SKIP),
    ],
)
async def test_a_checkpoint_holds_one_step_while_workers_run_in_threads(
    numbers_of: type[Numbers], background: bool, when_busy: WhenBusy, tmp_path: Path
) -> None:
    numbers = numbers_of()
    hook = CheckpointSaverHook(
        tmp_path, save_steps=1, saver=numbers, background=background, when_busy=when_busy,
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
            for _ in range(8):
                await session.run([])
        is_over.set()
    found = saved(tmp_path)
    assert len(found) >= (9 if when_busy is WhenBusy.WAIT else 2)
    assert found == {step: json.dumps([step] * 8) for step in found}


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
    seen: list[str] = []

    async def run() -> None:
        try:
            await held.run(1)
        except ZeroDivisionError as error:
            seen.append(str(error))

    async with held.session:
        await held.run(1)
        await held.hold_the_write_of_the_next_step()
        cell.is_lost = True
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await until(lambda: cell.value > 1000)
            await settle()
            assert "restore" not in "".join(held.saver.log)
            held.latch.open()
    if fails:
        assert "restore 0" in held.saver.log
        assert seen == ["in a write"], "it leaves once"
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
            numbers.values[0] += 1  # and no other
            raise PreemptionError("the machine is gone")
        return numbers.step()

    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=2)
    lets_fail = Calls(after_run=lambda *_: may_fail.set())
    saver = CheckpointSaverHook(tmp_path, save_steps=1, saver=numbers)
    async with (
        MonitoredSession([lets_fail, saver], creator) as session,
        MonitoredSession([], creator) as other,
        anyio.create_task_group() as group,
    ):
        group.start_soon(other.run, [], {"is_other": True})
        await other_runs.wait()
        for _ in range(2):
            await session.run([])
    found = saved(tmp_path)
    assert len(found) > 1
    assert found == {step: json.dumps([step] * 8) for step in found}
    assert "Step 1 is not saved: the session was lost" in caplog.text


async def test_a_damaged_checkpoint_leaves_as_itself_not_as_a_loss(tmp_path: Path) -> None:
    cell = Fragile()
    held = Held(tmp_path, cell=cell, background=False, save_steps=2)
    with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint"):
        async with held.session:
            (tmp_path / "model.ckpt-0" / "model.ckpt-0").write_text("9")
            cell.is_lost = True
            await held.run(1)


@pytest.mark.parametrize("what", ["a step", "a copy"])
async def test_nothing_is_restored_while_another_worker_steps_or_saves(
    what: str, tmp_path: Path
) -> None:
    class Watched(CopyingSaver):
        def snapshot(self) -> Callable[[str], None]:
            if what == "a copy":
                may_end.pass_by()
            return super().snapshot()

    cell, may_end, is_lost = Cell(), Latch(), False

    def step(is_slow: bool = False) -> dict[str, float]:
        if is_slow and what == "a step":
            may_end.pass_by()
        return cell.step()

    def lose(*_: Any) -> None:
        nonlocal is_lost
        if not is_lost:
            is_lost = True
            raise PreemptionError("the machine went away")

    saver = Watched(cell)
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
    shared = SharedSessionCreator(FunctionSessionCreator(step), num_workers=2)
    async with (
        MonitoredSession([hook], shared, step_runner="thread") as a,
        MonitoredSession([Calls(before_run=lose)], shared, step_runner="thread") as b,
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
