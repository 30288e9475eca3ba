"""Models, savers and latches that the tests of checkpoints hold training up with."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    CheckpointInUseError,
    CheckpointSaverHook,
    MonitoredSession,
    PreemptionError,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from asynchooks.checkpoints import CheckpointDirectory

BACKGROUND = pytest.mark.parametrize("background", [False, True])
LONG_SECS = 20.0
"""What never takes that long has failed."""


class Latch:
    """While it is closed, threads that pass by wait until it is opened."""

    def __init__(self) -> None:
        self._arrived, self._open = threading.Event(), threading.Event()
        self._open.set()

    def close(self) -> None:
        self._arrived.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_by(self) -> None:
        self._arrived.set()
        assert self._open.wait(LONG_SECS), "the latch was not opened"

    async def wait_for_arrival(self) -> None:
        await happened(self._arrived)


async def happened(event: threading.Event) -> None:
    """Wait for what a thread does."""
    came = await anyio.to_thread.run_sync(event.wait, LONG_SECS, abandon_on_cancel=True)
    assert came, "a thread did not do what it should"


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until it holds; what threads do cannot be waited for in another way."""
    with anyio.fail_after(LONG_SECS):
        while not condition():
            await anyio.lowlevel.checkpoint()


class Cell:
    """A model of one number, which each step moves by one."""

    def __init__(self) -> None:
        self.value = 0

    def step(self) -> dict[str, float]:
        self.value += 1
        return {"value": self.value, "loss": 1.0 / self.value}


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
            raise PreemptionError("the machine went away")
        return outputs


class PlainSaver:
    """Saves a cell while training stands still; the n-th write raises the n-th error, if any."""

    def __init__(self, cell: Cell, *errors: BaseException | None) -> None:
        self.cell = cell
        self.errors = list(errors)
        self.latch = Latch()
        self.log: list[str] = []

    def save(self, path: str) -> None:
        self._write(path, self.cell.value)

    def restore(self, path: str) -> None:
        self.log.append(f"restore {Path(path).read_text()}")
        self.cell.value = int(Path(path).read_text())

    def _write(self, path: str, value: int) -> None:
        self.log.append(f"begin {value}")
        error = self.errors.pop(0) if self.errors else None
        self.latch.pass_by()
        if error is not None:
            raise error
        Path(path).write_text(str(value))
        self.log.append(f"end {value}")


class CopyingSaver(PlainSaver):
    """As that, but training may go on while the copy is written."""

    def snapshot(self) -> Callable[[str], None]:
        value = self.cell.value
        return lambda path: self._write(path, value)


class SlowCopy(CopyingSaver):
    """Its copy passes by a latch, too."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.copies = Latch()

    def snapshot(self) -> Callable[[str], None]:
        self.copies.pass_by()
        return super().snapshot()


def session_on(cell: Cell, *hooks: Any, **options: Any) -> MonitoredSession:
    return MonitoredSession(hooks, cell.step, **options)


class Held:
    """A session on a cell whose checkpoints are written when the test lets them.

    Args:
        errors: the n-th write raises the n-th of them.
        before: hooks in front of the saver hook; `after`: those behind it.
        options: of the saver hook; it saves each step, in the background, unless they say else.
    """

    def __init__(
        self,
        path: Path,
        saver: type[PlainSaver] = CopyingSaver,
        *,
        cell: Cell | None = None,
        errors: Sequence[BaseException | None] = (),
        before: Sequence[Any] = (),
        after: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        self.cell = cell or Cell()
        self.saver: Any = saver(self.cell, *errors)
        options = {"save_steps": 1, "background": True, **options}
        self.hook = CheckpointSaverHook(path, saver=self.saver, **options)
        self.session = session_on(self.cell, *before, self.hook, *after)
        self.latch: Latch = self.saver.latch

    async def run(self, num_runs: int) -> None:
        for _ in range(num_runs):
            await self.session.run([])

    async def wait_idle(self) -> None:
        """Until all is written."""
        await self.hook.checkpointer.wait_idle()

    async def hold_the_write_of_the_next_step(self) -> None:
        await self.wait_idle()
        self.latch.close()
        await self.run(1)
        await self.latch.wait_for_arrival()

    def written(self) -> list[int]:
        """The values of the cell whose writes have begun."""
        return [int(line.split()[1]) for line in self.saver.log if line.startswith("begin")]


class Counter(SessionRunHook):
    """Counts the runs that it has seen, as a part of the checkpoint."""

    def __init__(self) -> None:
        self.runs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"runs": self.runs}

    def load_state_dict(self, state: Any) -> None:
        self.runs = state["runs"]

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.runs += 1


def saved(path: Path) -> dict[int, str]:
    """What each checkpoint of a cell holds, by step."""
    every = CheckpointDirectory(path).checkpoints()
    return {each.step: Path(each.prefix).read_text() for each in every}


async def check_that_training_goes_on(path: Path, begins_at: int) -> None:
    held = Held(path)
    async with held.session:
        assert held.cell.value == held.session.global_step.value == begins_at
        await held.run(1)
    assert saved(path)[begins_at + 1] == str(begins_at + 1)


def metrics_of(path: Path) -> dict[int, float | None]:
    """The metric of each checkpoint, by step."""
    return {each.step: each.metric for each in CheckpointDirectory(path).checkpoints()}


def is_free(path: Path) -> bool:
    """Whether another run may use the directory."""
    directory = CheckpointDirectory(path)
    try:
        directory.open()
    except CheckpointInUseError:
        return False
    directory.close()
    return True
