"""What a metric costs the step that it is taken at, beside Lightning's and Keras's loggers.

    python -m tests.benchmarks.metrics

Lightning's CSVLogger gets a row at each step and writes its file at every 100th, as its Trainer has
it; Keras's TensorBoard callback writes at each batch (update_freq=1). Ours is given one number at
each step, or is not due. It does not measure what the writing threads take of another core.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from asynchooks import HistoryHook, MetricsHook, ProgressHook
from asynchooks.metrics import CsvSink, JsonLinesSink, TensorBoardSink

from ._contenders import FAR_AWAY, above, called, compare, do_nothing, function_session
from ._report import is_installed, print_table, run_on, typical

NUM_ROUNDS, NUM_STEPS = 15, 2000


async def ours(folder: Path) -> dict[str, list[float]]:
    """Seconds per step of each session above one whose single hook does nothing."""
    hooks: dict[str, Any] = {
        "MetricsHook, not due": MetricsHook(CsvSink(folder / "a.csv"), "loss", FAR_AWAY),
        "HistoryHook, not due": HistoryHook("loss", FAR_AWAY),
        "ProgressHook, not due": ProgressHook("loss", every_n_secs=FAR_AWAY),
        "MetricsHook, CSV, each step": MetricsHook(CsvSink(folder / "b.csv"), "loss", 1),
        "MetricsHook, JSON lines, each step": MetricsHook(
            JsonLinesSink(folder / "c.jsonl"), "loss", 1
        ),
        "MetricsHook, TensorBoard, each step": MetricsHook(
            TensorBoardSink(folder / "d"), "loss", 1
        ),
        "HistoryHook, each step": HistoryHook("loss", 1),
    }
    lists = {"base": [], **{name: [hook] for name, hook in hooks.items()}}
    sessions = {
        name: function_session(do_nothing, 1, more, step_runner="inline")
        for name, more in lists.items()
    }
    secs = await compare(sessions, NUM_STEPS, NUM_ROUNDS)
    base = secs.pop("base")
    return {name: above(each, base) for name, each in secs.items()}


async def lightning(folder: Path) -> list[float]:
    """Seconds per step of Lightning's logger, with a row at each step."""
    from pytorch_lightning.loggers import CSVLogger

    logger, step = CSVLogger(str(folder / "lightning")), 0

    def log() -> None:
        nonlocal step
        step += 1
        logger.log_metrics({"loss": 0.5}, step)
        if step % 100 == 0:
            logger.save()

    return (await compare({"log": called(log)}, NUM_STEPS, NUM_ROUNDS))["log"]


async def keras(folder: Path) -> list[float]:
    """Seconds per batch that a TensorBoard callback adds to `fit`, with one metric."""
    import keras as library
    import numpy as np

    model = library.Sequential([library.Input((4,)), library.layers.Dense(1)])
    model.compile("sgd", "mse")
    inputs, targets = np.zeros((NUM_STEPS, 4), np.float32), np.zeros((NUM_STEPS, 1), np.float32)

    def secs(callbacks: list[Any]) -> float:
        begun = time.perf_counter()
        model.fit(inputs, targets, batch_size=4, verbose=0, callbacks=callbacks)
        return (time.perf_counter() - begun) / (NUM_STEPS / 4)

    def board(turn: int) -> Any:
        return library.callbacks.TensorBoard(folder / f"keras{turn}", update_freq=1)

    return [secs([board(turn)]) - secs([]) for turn in range(NUM_ROUNDS)]


def main() -> None:
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for loop in ("asyncio", "trio"):
            for name, secs in run_on(loop, ours, Path(tempfile.mkdtemp(dir=folder))).items():
                found[name, loop] = secs
        if is_installed("pytorch_lightning"):
            found["Lightning's CSVLogger, each step", "-"] = run_on(
                "asyncio", lightning, Path(folder)
            )
        if is_installed("keras"):
            found["Keras's TensorBoard, each batch", "-"] = run_on("asyncio", keras, Path(folder))
    rows = [[*names, typical([each * 1e6 for each in secs])] for names, secs in found.items()]
    print_table("us of a step, above a session with one hook", ["what", "loop", "us"], rows)


if __name__ == "__main__":
    main()
