"""What our session takes to train a small Keras model, beside `model.fit` on the same batches.

    python -m tests.benchmarks.keras_fit

It does not measure what comes before the first and after the last batch (of either), Keras's
callbacks, nor our HooksCallback.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from asynchooks import FunctionSessionCreator, MonitoredSession, StepCounterHook, StopAtStepHook

from ._contenders import Block, median_ratio, run_by, secs_per_step
from ._report import Measure, Row, print_rows, rows_of, run_on

NUM_ROUNDS, NUM_BATCHES, BATCH_SIZE = 11, 200, 32
FAR_AWAY = 1_000_000_000

COMPILED = (
    "Keras: session calling model.train_function on a Dataset / batches of model.fit, same data"
)
ON_BATCH = "Keras: session calling model.train_on_batch on arrays / batches of model.fit, same data"
MEASURES = [Measure(COMPILED, peer="keras"), Measure(ON_BATCH, peer="keras")]


def small_model() -> Any:
    import keras

    layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model


def data() -> tuple[Any, Any]:
    """Inputs, float32, shape (rows, 16), and targets, float32, shape (rows, 1)."""
    import numpy as np

    rng = np.random.default_rng(seed=0)
    num_rows = NUM_BATCHES * BATCH_SIZE
    inputs = rng.normal(size=(num_rows, 16)).astype(np.float32)
    return inputs, inputs.sum(axis=1, keepdims=True)


def by_fit(*args: Any, **kwargs: Any) -> Block:
    import keras

    class Epoch(keras.callbacks.Callback):  # type: ignore[misc]
        """Times the batches alone; without methods for batches it adds nothing to them."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begun = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.secs = time.perf_counter() - self.begun

    model = small_model()

    async def block(num_batches: int) -> float:
        # every so often fit waits 130 to 170 ms before it returns, long after the last batch and
        # without computing: counted, that would halve our ratio by chance
        epoch = Epoch()
        options = {"verbose": 0, "shuffle": False, "steps_per_epoch": num_batches}
        model.fit(*args, callbacks=[epoch], **options, **kwargs)
        return float(epoch.secs)

    return block


class Training:
    """A step function that trains on the next batch of an epoch."""

    def __init__(self, batches: Callable[[], Iterator[Any]], train: Callable[[Any], Any]) -> None:
        self._batches = batches
        self._train = train

    def begin_epoch(self) -> None:
        self._epoch = self._batches()

    def end_epoch(self) -> None:
        del self._epoch

    def step(self) -> Any:
        return self._train(self._epoch)


@asynccontextmanager
async def our_session(training: Training) -> AsyncIterator[Block]:
    hooks = [StopAtStepHook(last_step=FAR_AWAY), StepCounterHook()]
    async with MonitoredSession(hooks, FunctionSessionCreator(training.step)) as session:
        run_batches = run_by(session, "loss")

        async def block(num_batches: int) -> float:
            begun = time.perf_counter()
            training.begin_epoch()  # fit makes its iterator within the epoch, too
            await run_batches(num_batches)
            secs = time.perf_counter() - begun
            training.end_epoch()
            return secs

        yield block


def compiled_training(dataset: Any) -> Training:
    """Keras's own compiled step on an iterator, as `fit` calls it for each batch."""
    model = small_model()
    model.make_train_function()
    return Training(lambda: iter(dataset), model.train_function)


def on_batch_training(inputs: Any, targets: Any) -> Training:
    model = small_model()

    def batches() -> Iterator[tuple[Any, Any]]:
        for first in range(0, len(inputs), BATCH_SIZE):
            rows = slice(first, first + BATCH_SIZE)
            yield inputs[rows], targets[rows]

    return Training(batches, lambda epoch: model.train_on_batch(*next(epoch), return_dict=True))


async def ratio(training: Training, theirs: Block) -> str:
    async with our_session(training) as ours:
        secs = await secs_per_step({"ours": ours, "theirs": theirs}, NUM_BATCHES, NUM_ROUNDS)
    return median_ratio(secs["ours"], secs["theirs"])


async def ratios() -> dict[str, str]:
    import tensorflow as tf

    inputs, targets = data()
    dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(BATCH_SIZE)
    fit_arrays = by_fit(inputs, targets, batch_size=BATCH_SIZE)
    return {
        COMPILED: await ratio(compiled_training(dataset), by_fit(dataset)),
        ON_BATCH: await ratio(on_batch_training(inputs, targets), fit_arrays),
    }


def figures(loop: str) -> dict[str, str]:
    return run_on(loop, ratios)


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
