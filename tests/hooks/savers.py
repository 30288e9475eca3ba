"""Models, savers and latches that the tests of checkpoints hold training up with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from asynchooks import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from asynchooks.checkpoints import CheckpointDirectory

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
        assert self._open.wait(LONG_SECS), "nobody opened the latch"

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


class Noisy:
    """A model of arrays, and the generator of its noise."""

    def __init__(self, seed: int = 7) -> None:
        self.weights = {f"w{i}": np.zeros(3) for i in range(4)}
        self.random = np.random.default_rng(seed)

    def step(self, data: Any = 0.0) -> dict[str, float]:
        for weight in self.weights.values():
            weight += 0.5 * data + self.random.normal(size=3) - 0.1 * weight
        return {"loss": float(sum(each.sum() for each in self.weights.values()))}


class Noise(SessionRunHook):
    """Feeds what a generator draws, and keeps the generators of hook and model in checkpoints."""

    def __init__(self, seed: int, model: Noisy | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.model = model
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        generators = [self.random] + ([] if self.model is None else [self.model.random])
        return {"states": [each.bit_generator.state for each in generators], "total": self.total}

    def load_state_dict(self, state: Any) -> None:
        generators = [self.random] + ([] if self.model is None else [self.model.random])
        for generator, found in zip(generators, state["states"], strict=True):
            generator.bit_generator.state = found
        self.total = state["total"]

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        drawn = self.random.normal()
        return None if self.model is None else SessionRunArgs(None, {"data": drawn})

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.total += self.random.normal()


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


def threads_left() -> list[str]:
    """The names of threads of ours that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith("asynchooks")]
