"""CheckpointSaverHook on step functions: workers that share a model, and lost sessions."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
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
    SessionRunHook,
    SharedSessionCreator,
    WhenBusy,
)
from asynchooks.checkpoints import CheckpointDirectory

from ...support.helpers import settle
from ..preemptions import At
from ..savers import (
    Cell,
    CopyingSaver,
    Counter,
    Fragile,
    Held,
    Latch,
    PlainSaver,
    happened,
    saved,
    until,
)

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


class SlowlyRestoring(CopyingSaver):
    """Waits in the midst of a restore while its latch is closed."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.restores = Latch()

    def restore(self, path: str) -> None:
        self.restores.pass_by()
        super().restore(path)


async def test_a_worker_goes_on_from_the_checkpoint_that_another_was_cancelled_in_restoring(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path, save_steps=9)
    async with held.session:
        await held.run(5)
    cell = Cell()
    saver, creator = SlowlyRestoring(cell), FunctionSessionCreator(cell.step)
    shared = SharedSessionCreator(creator, num_workers=2)
    hook = CheckpointSaverHook(tmp_path, save_steps=9, saver=saver)
    saver.restores.close()
    async with anyio.create_task_group() as group:
        group.start_soon(MonitoredSession([hook], shared).open)
        await saver.restores.wait_for_arrival()
        group.cancel_scope.cancel()
        saver.restores.open()
    async with MonitoredSession([], shared) as other:
        assert await other.run("value") == other.global_step.value == 6


async def test_a_second_opening_of_one_creator_restores_again(tmp_path: Path) -> None:
    cell = Cell()
    hook = CheckpointSaverHook(tmp_path, save_steps=9, saver=CopyingSaver(cell))
    shared = SharedSessionCreator(FunctionSessionCreator(cell.step))
    for begun in (0, 2, 4):
        async with MonitoredSession([hook], shared) as session:
            assert session.global_step.value == cell.value == begun
            for _ in range(2):
                await session.run([])
        cell.value = 77


@pytest.mark.parametrize("saver", [PlainSaver, CopyingSaver])
@pytest.mark.parametrize("background", [False, True])
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
    assert [line for line in held.saver.log if "begin" not in line] == [
        "end 0", "end 3", "restore 3", "end 6", "end 7",
    ]  # fmt: skip
    assert saved(tmp_path) == {step: str(step) for step in (0, 3, 6, 7)}


async def test_a_write_under_way_is_waited_for_and_is_the_newest(tmp_path: Path) -> None:
    cell = Fragile()
    held = Held(tmp_path, cell=cell, save_steps=2)
    async with held.session as session:
        await held.run(1)
        await held.hold_the_write_of_the_next_step()
        await held.run(1)
        cell.is_lost = True
        async with anyio.create_task_group() as group:
            group.start_soon(held.run, 1)
            await until(lambda: cell.value > 1000)
            await settle()
            assert "restore" not in "".join(held.saver.log)
            held.latch.open()
        assert held.saver.log[-2:] == ["end 2", "restore 2"]
        assert cell.value == session.global_step.value == 3


async def test_a_write_that_fails_leaves_the_older_one_and_its_error_leaves_once(
    tmp_path: Path,
) -> None:
    cell = Fragile()
    held = Held(tmp_path, cell=cell, errors=[None, ZeroDivisionError("in a write")], save_steps=2)
    errors: list[Exception] = []

    async def run() -> None:
        try:
            await held.run(1)
        except Exception as error:
            errors.append(error)

    async with held.session:
        await held.run(1)
        await held.hold_the_write_of_the_next_step()
        cell.is_lost = True
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await until(lambda: cell.value > 1000)
            held.latch.open()
    assert [str(error) for error in errors] == ["in a write"]
    assert "restore 0" in held.saver.log


@pytest.mark.parametrize("background", [False, True])
async def test_a_model_that_was_lost_in_the_middle_of_a_step_is_not_saved(
    background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The save waits for the step of another worker, which then fails."""
    numbers, other_runs, may_fail = Numbers(), anyio.Event(), anyio.Event()

    async def step(is_other: bool) -> dict[str, int]:
        if is_other and not may_fail.is_set():
            other_runs.set()
            await may_fail.wait()
            numbers.values[0] += 1  # and no other
            raise PreemptionError("the machine is gone")
        return numbers.step()

    class LetsFail(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            may_fail.set()

    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=2)
    numbers_saver = NumbersSaver(numbers)
    saver = CheckpointSaverHook(tmp_path, save_steps=1, saver=numbers_saver, background=background)

    async def run_other(session: MonitoredSession) -> None:
        await session.run([], feed_dict={"is_other": True})

    async with (
        MonitoredSession([LetsFail(), saver], creator) as session,
        MonitoredSession([], creator) as other,
        anyio.create_task_group() as group,
    ):
        group.start_soon(run_other, other)
        await other_runs.wait()
        for _ in range(2):
            await session.run([], feed_dict={"is_other": False})
    found = CheckpointDirectory(tmp_path).checkpoints()
    assert len(found) > 1
    for each in found:
        numbers_saver.restore(each.prefix)
        assert numbers.values == [each.step] * 8
    assert "Step 1 is not saved: the session was lost, perhaps in the middle" in caplog.text


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
    held = Held(tmp_path, cell=cell, background=False, save_steps=2)
    with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint"):
        async with held.session:
            (tmp_path / "model.ckpt-0" / "model.ckpt-0").write_text("9")
            cell.is_lost = True
            await held.run(1)


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


class Loses(SessionRunHook):
    """Finds the session lost in its first run after an event."""

    def __init__(self, begun: threading.Event) -> None:
        self.begun = begun
        self.is_done = False

    async def before_run(self, run_context: Any) -> None:
        if not self.is_done and self.begun.is_set():
            self.is_done = True
            raise PreemptionError("the machine went away")


@asynccontextmanager
async def two_workers(
    hook: CheckpointSaverHook, step: Callable[..., Any], begun: threading.Event
) -> AsyncIterator[tuple[MonitoredSession, MonitoredSession]]:
    """One with the hook, and one that finds the session lost once the event is set."""
    shared = SharedSessionCreator(FunctionSessionCreator(step), num_workers=2)
    async with (
        MonitoredSession([hook], shared) as a,
        MonitoredSession([Loses(begun)], shared, step_runner="thread") as b,
    ):
        yield a, b


async def test_nothing_is_restored_while_another_workers_step_is_under_way(tmp_path: Path) -> None:
    cell = Cell()
    saver = Watched(cell)
    begun = threading.Event()

    def step(is_slow: bool = False) -> dict[str, float]:
        if is_slow:
            begun.set()
            saver.hold("a step")
        return cell.step()

    hook = CheckpointSaverHook(tmp_path, save_steps=9, saver=saver)
    async with two_workers(hook, step, begun) as (a, b):
        async with anyio.create_task_group() as group:
            group.start_soon(a.run, "value", {"is_slow": True})
            await happened(begun)
            await b.run([])
        assert saver.overlaps == []
        assert cell.value == a.global_step.value


class WatchedCopy(Watched):
    """Its copy is slow, too, once the test wants it."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.begun = threading.Event()
        self.is_slow = False

    def snapshot(self) -> Callable[[str], None]:
        value = self.cell.value
        if self.is_slow:
            self.begun.set()
            self.hold("a save")
            assert self.cell.value == value, "the copy mixes two states"
        return lambda path: self._write(path, value)


async def test_nothing_is_restored_while_the_hook_copies_the_model(tmp_path: Path) -> None:
    cell = Cell()
    saver = WatchedCopy(cell)
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
    async with two_workers(hook, cell.step, saver.begun) as (a, b):
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
    async def wait() -> None:
        arrived.set()
        await may_go_on.wait()

    cell, arrived, may_go_on = Fragile(), anyio.Event(), anyio.Event()
    saver = CopyingSaver(cell, None, ZeroDivisionError("in a write"))
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver, background=True)
    shared = SharedSessionCreator(FunctionSessionCreator(cell.step), num_workers=2)
    waits = At(before_run=wait)
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
                await hook.checkpointer.wait_idle()
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
