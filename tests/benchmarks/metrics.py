"""What a metric costs the step that it is taken at, beside Lightning's and Keras's loggers.

    python -m tests.benchmarks.metrics

Lightning's CSVLogger gets a row at each step and writes its file at every 100th, as its Trainer has
it; Keras's TensorBoard callback writes at each batch (update_freq=1). Ours is given one number at
each step, or is not due. It does not measure what the writing threads take of another core.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from asynchooks import HistoryHook, MetricsHook, ProgressHook
from asynchooks.metrics import CsvSink, JsonLinesSink, TensorBoardSink

from ._contenders import FAR_AWAY, above, called, compare, do_nothing, function_session
from ._report import is_installed, measure, typical

NUM_ROUNDS, NUM_STEPS = 15, 2000


async def ours(folder: Path) -> dict[str, list[float]]:
    """Seconds per step of each session above one whose single hook does nothing."""
    hooks: dict[str, Any] = {
        "MetricsHook, not due": MetricsHook(CsvSink(folder / "a.csv"), "loss", FAR_AWAY),
        "HistoryHook, not due": HistoryHook("loss", FAR_AWAY),
        "ProgressHook, not due": ProgressHook("loss", every_n_secs=FAR_AWAY),
        "HistoryHook, each step": HistoryHook("loss", 1),
    }
    for kind in (CsvSink, JsonLinesSink, TensorBoardSink):
        name = kind.__name__
        hooks[f"MetricsHook, {name}, each step"] = MetricsHook(kind(folder / name), "loss", 1)
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


def keras(folder: Path) -> list[float]:
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


async def figures(loop: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        found = await ours(Path(folder))
        if loop == "asyncio" and is_installed("pytorch_lightning"):
            found["Lightning's CSVLogger, each step"] = await lightning(Path(folder))
        if loop == "asyncio" and is_installed("keras"):
            found["Keras's TensorBoard, each batch"] = keras(Path(folder))
    return {f"us of a step: {name}": typical([each * 1e6 for each in secs])
            for name, secs in found.items()}  # fmt: skip


if __name__ == "__main__":
    measure(figures)
