"""Training programs that get signals while something does not end; they say what they see."""

import logging
import os
import select
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionHook,
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


@on_backend
async def unread(pipe: Connection) -> None:
    """The main thread writes to a pipe that is not read, as behind a log collector that hangs."""
    _, write_end = os.pipe()

    def tell_when_full() -> None:
        while select.select([], [write_end], [], 0)[1]:
            time.sleep(0.001)
        pipe.send(("stuck",))

    sys.stdout = os.fdopen(write_end, "w")
    hook = PreemptionHook(deadline_secs=0.5)
    async with MonitoredSession([hook], FunctionSessionCreator(dict)):
        threading.Thread(target=tell_when_full, daemon=True).start()
        print("x" * 1_000_000, flush=True)
