"""Training by several workers that share a model and its input, to be killed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    Retention,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
)
from asynchooks.data import Stage, map_concurrent, prefetch

from .programs import Generator, Reports, on_backend

NUM_WORKERS = 8
MAX_ITEMS = 100_000


class CountingModel:
    """What it has learnt does not depend on the order of the items: all sums are exact."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {
            "weights": np.zeros(4),
            "moments": np.zeros(4),
            "counts": np.zeros(MAX_ITEMS, np.int8),
        }
        self.rng = np.random.default_rng(3)

    def step(self, x: int) -> dict[str, Any]:
        self.arrays["weights"] += x
        self.arrays["moments"] += x * x
        self.arrays["counts"][x] += 1
        self.rng.random()
        return {}

    def after(self, num_items: int) -> CountingModel:
        """A new one, trained with so many items without an interruption."""
        model = CountingModel()
        for item in range(num_items):
            model.step(item)
        return model

    @property
    def state(self) -> dict[str, Any]:
        arrays = {name: array.tobytes() for name, array in self.arrays.items()}
        return {**arrays, "rng": self.rng.bit_generator.state}


class Slow(SessionRunHook):
    """Lets the other workers run, between the item and its step."""

    async def before_run(self, run_context: SessionRunContext) -> None:
        await anyio.sleep(0.002)


async def fetch(item: int) -> int:
    await anyio.sleep(0.001)
    return item


@on_backend
async def train_together(directory: Path, pipe: Connection, feeds: bool, num_items: int) -> None:
    """Train with that many items by eight workers, of which the last has the checkpoints."""
    model = CountingModel()
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    source: Stage[int] = prefetch(map_concurrent(fetch, range(num_items), 4), 4)

    async def work(place: int) -> None:
        hooks: list[SessionRunHook] = [FeedHook(source, "x")] if feeds else []
        hooks.append(Slow())
        if place == NUM_WORKERS - 1:
            saver = StateDictSaver(arrays=model.arrays, rng=Generator(model.rng))
            hooks += [
                Reports(pipe),
                CheckpointSaverHook(
                    directory, save_steps=7, saver=saver, listeners=[Reports(pipe)],
                    background=True, retention=Retention(max_to_keep=2),
                ),
            ]  # fmt: skip
            if not feeds:
                hooks.append(InputPositionHook(source))
        async with MonitoredSession(hooks, creator) as session:
            if feeds:
                while not session.should_stop():
                    await session.run([])
            else:
                async for item in session.batches(source):
                    await session.run([], {"x": item})

    async with anyio.create_task_group() as group:
        for place in range(NUM_WORKERS):
            group.start_soon(work, place)
    pipe.send(("ends", model.state))
