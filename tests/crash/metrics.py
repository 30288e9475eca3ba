"""A training that writes metrics to three sinks at once, to be killed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MetricsHook,
    MonitoredSession,
    Retention,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.metrics import CsvSink, JsonLinesSink, TensorBoardSink

from .programs import Reports, on_backend

SAVE_STEPS = 20


def is_logged(step: int) -> bool:
    """Whether the loop itself logs a metric after the step, which no checkpoint is of.

    What is logged after the save of its step is behind the restored one: no run logs it again.
    """
    return step % SAVE_STEPS == 13


@on_backend
async def train_with_metrics(
    directory: Path, pipe: Connection, last_step: int | None = None
) -> None:
    """Train until it is killed, or up to a step; each step's number is its metric."""
    arrays = {"step": np.zeros(())}

    def step() -> dict[str, float]:
        arrays["step"] += 1
        return {"number": float(arrays["step"])}

    logs = directory / "logs"
    hooks: list[Any] = [
        Reports(pipe),
        CheckpointSaverHook(
            directory / "saved", save_steps=SAVE_STEPS, saver=StateDictSaver(arrays=arrays),
            listeners=[Reports(pipe)], background=True, retention=Retention(max_to_keep=2),
        ),
        StepCounterHook(every_n_steps=50, output_dir=str(logs)),
        MetricsHook(
            [TensorBoardSink(logs), JsonLinesSink(logs / "m.jsonl"), CsvSink(logs / "m.csv")],
            "number",
            every_n_steps=1,
        ),
    ]  # fmt: skip
    if last_step is not None:
        hooks.append(StopAtStepHook(last_step=last_step))
    session = MonitoredSession(hooks, FunctionSessionCreator(step))
    async with session:
        while not session.should_stop():
            await session.run("number")
            number = session.global_step.value
            if is_logged(number):
                session.log_metrics({"logged": number})
            await anyio.sleep(0.001)
    pipe.send(("ends", session.global_step.value))
