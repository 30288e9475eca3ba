"""Training programs that get signals while something does not end; they say what they see."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionHook,
    SharedSessionCreator,
    StateDictSaver,
)

from .programs import Reports, on_backend


class Notes(logging.Handler):
    """Sends what is logged."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.WARNING)
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self.pipe.send(("logged", record.getMessage()))


@on_backend
async def stuck(directory: Path, pipe: Connection, where: str, deadline_secs: float) -> None:
    """Three steps, a save of each even one, and then something that does not end.

    Args:
        where: "block", "step" or "save": what does not end.
    """
    array = np.zeros(3)
    logging.getLogger("asynchooks").addHandler(Notes(pipe))

    def step() -> dict[str, float]:
        if where == "step" and array[0] == 3:
            pipe.send(("stuck",))
            threading.Event().wait()
        array[:] += 1
        return {"sum": float(array.sum())}

    class Saver:
        saver = StateDictSaver(weights={"a": array})
        restore = saver.restore

        def save(self, path: str) -> None:
            if where == "save" and array[0] == 4:
                pipe.send(("stuck",))
                time.sleep(60)
            self.saver.save(path)

    hooks = [
        PreemptionHook(deadline_secs=deadline_secs, same_signal_secs=0.2),
        CheckpointSaverHook(directory, save_steps=2, saver=Saver(), listeners=[Reports(pipe)]),
    ]
    session = MonitoredSession(hooks, FunctionSessionCreator(step), step_runner="thread")
    async with session:
        for _ in range(3):
            await session.run([])
        if where == "block":
            pipe.send(("stuck",))
            await anyio.sleep_forever()
        with anyio.CancelScope(shield=True):
            await session.run([])


def work(backend: str, number: int, num_workers: int) -> None:
    """Sessions in the tasks of a group, or one in the main task, which raises a signal."""
    try:
        anyio.run(_work, number, num_workers, backend=backend)
    except* SystemExit as left:  # trio's groups wrap it
        raise left.exceptions[0] from None


async def _work(number: int, num_workers: int) -> None:
    hook, creator = PreemptionHook(), SharedSessionCreator(FunctionSessionCreator(dict))
    signals = [number]

    async def train() -> None:
        async with MonitoredSession([hook], creator) as session:
            while not session.should_stop():
                await session.run([])
                await anyio.lowlevel.checkpoint()
                if session.global_step.value >= 20 and signals:
                    signal.raise_signal(signals.pop())

    if num_workers == 1:
        await train()
        return
    async with anyio.create_task_group() as group:
        for _ in range(num_workers):
            group.start_soon(train)


@on_backend
async def unread(pipe: Connection) -> None:
    """The main thread writes to a pipe that is not read, as behind a log collector that hangs."""
    _, write_end = os.pipe()
    sys.stdout = os.fdopen(write_end, "w")
    hook = PreemptionHook(deadline_secs=0.5)
    async with MonitoredSession([hook], FunctionSessionCreator(dict)):
        pipe.send(("stuck",))
        print("x" * 1_000_000, flush=True)
