"""What a metric costs the step that it is taken at, beside Lightning's and Keras's loggers.

    python -m tests.benchmarks.metrics

Lightning's CSVLogger gets a row at each step and writes its file at every 100th, as its Trainer has
it; Keras's TensorBoard callback writes at each batch (update_freq=1). Ours is given one number at
each step, or is not due. It does not measure what the writing threads take of another core.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from asynchooks import (
    FunctionSessionCreator,
    HistoryHook,
    MetricsHook,
    MonitoredSession,
    ProgressHook,
)
from asynchooks.metrics import CsvSink, JsonLinesSink, TensorBoardSink

from ._contenders import Block, DoNothing, above, do_nothing, run_by, secs_per_step
from ._report import is_installed, print_table, run_on, typical

NUM_ROUNDS, NUM_STEPS = 15, 2000
NEVER = 10**9
MICRO = 1e6


def sessions(folder: Path) -> dict[str, list[Any]]:
    """The hooks of each session, beside one that does nothing, by what they do."""
    return {
        "MetricsHook, not due": [MetricsHook(CsvSink(folder / "a.csv"), "loss", NEVER)],
        "HistoryHook, not due": [HistoryHook("loss", NEVER)],
        "ProgressHook, not due": [ProgressHook("loss", every_n_secs=NEVER)],
        "MetricsHook, CSV, each step": [MetricsHook(CsvSink(folder / "b.csv"), "loss", 1)],
        "MetricsHook, JSON lines, each step": [
            MetricsHook(JsonLinesSink(folder / "c.jsonl"), "loss", 1)
        ],
        "MetricsHook, TensorBoard, each step": [
            MetricsHook(TensorBoardSink(folder / "d"), "loss", 1)
        ],
        "HistoryHook, each step": [HistoryHook("loss", 1)],
    }


async def ours(folder: Path) -> dict[str, list[float]]:
    """Seconds per step of each session above one whose single hook does nothing."""
    blocks: dict[str, Block] = {}
    async with AsyncExitStack() as stack:
        for name, hooks in {"base": [], **sessions(folder)}.items():
            creator = FunctionSessionCreator(do_nothing)
            session = MonitoredSession([DoNothing(), *hooks], creator, step_runner="inline")
            blocks[name] = run_by(await stack.enter_async_context(session), "loss")
        secs = await secs_per_step(blocks, NUM_STEPS, NUM_ROUNDS)
    base = secs.pop("base")
    return {name: above(each, base) for name, each in secs.items()}


def lightning(folder: Path) -> list[float]:
    """Seconds per step of Lightning's logger, with a row at each step."""
    from pytorch_lightning.loggers import CSVLogger

    logger = CSVLogger(str(folder / "lightning"))
    step = 0

    def log() -> None:
        nonlocal step
        step += 1
        logger.log_metrics({"loss": 0.5}, step)
        if step % 100 == 0:
            logger.save()

    return [_secs_per_call(log) for _ in range(NUM_ROUNDS)]


def keras(folder: Path) -> list[float]:
    """Seconds per batch that a TensorBoard callback adds to `fit`, with one metric."""
    import keras as library
    import numpy as np

    layers = [library.Input((4,)), library.layers.Dense(1)]
    model = library.Sequential(layers)
    model.compile("sgd", "mse")
    inputs, targets = np.zeros((NUM_STEPS, 4), np.float32), np.zeros((NUM_STEPS, 1), np.float32)

    def fit(callbacks: list[Any]) -> float:
        begun = time.perf_counter()
        model.fit(inputs, targets, batch_size=4, verbose=0, callbacks=callbacks)
        return (time.perf_counter() - begun) / (NUM_STEPS / 4)

    found = []
    for turn in range(NUM_ROUNDS):
        board = library.callbacks.TensorBoard(folder / f"keras{turn}", update_freq=1)
        found.append(fit([board]) - fit([]))
    return found


def _secs_per_call(fn: Callable[[], None]) -> float:
    begun = time.perf_counter()
    for _ in range(NUM_STEPS):
        fn()
    return (time.perf_counter() - begun) / NUM_STEPS


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for loop in ("asyncio", "trio"):
            for name, secs in run_on(loop, ours, Path(tempfile.mkdtemp(dir=folder))).items():
                rows.append([name, loop, typical([each * MICRO for each in secs], 2)])
        if is_installed("pytorch_lightning"):
            theirs = [each * MICRO for each in lightning(Path(folder))]
            rows.append(["Lightning's CSVLogger, each step", "-", typical(theirs, 2)])
        if is_installed("keras"):
            theirs = [each * MICRO for each in keras(Path(folder))]
            rows.append(
                ["Keras's TensorBoard, each batch", "-", f"{statistics.median(theirs):.0f}"]
            )
    print_table("us of a step, above a session with one hook", ["what", "loop", "us"], rows)


if __name__ == "__main__":
    main()
