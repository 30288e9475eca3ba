"""What our session takes to train a small Keras model, beside `model.fit` on the same batches.

    python -m tests.benchmarks Keras

It does not measure what comes before the first and after the last batch (of either), Keras's
callbacks, nor our HooksCallback.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from asynchooks import StepCounterHook, StopAtStepHook

from ._contenders import FAR_AWAY, Block, function_session, ratio
from ._report import is_installed

NUM_ROUNDS, NUM_BATCHES, BATCH_SIZE = 11, 200, 32

THEIRS = "/ batches of model.fit, same data"


def small_model() -> Any:
    import keras

    layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model


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


async def beside(
    new_epoch: Callable[[], Iterator[Any]], train: Callable[[Any], Any], theirs: Block
) -> str:
    """Of a session whose step trains on the next batch of an epoch, to `fit`."""
    epoch: Iterator[Any] = iter(())
    hooks = [StopAtStepHook(last_step=FAR_AWAY), StepCounterHook()]
    async with function_session(lambda: train(epoch), hooks=hooks) as run_batches:

        async def ours(num_batches: int) -> float:
            nonlocal epoch
            begun = time.perf_counter()
            epoch = new_epoch()  # fit makes its iterator within the epoch, too
            await run_batches(num_batches)
            return time.perf_counter() - begun

        return await ratio(ours, theirs, NUM_BATCHES, NUM_ROUNDS)


async def figures(loop: str) -> dict[str, str]:
    if not is_installed("keras"):
        return {}
    import numpy as np
    import tensorflow as tf

    num_rows = NUM_BATCHES * BATCH_SIZE
    inputs = np.random.default_rng(seed=0).normal(size=(num_rows, 16)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True)
    dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(BATCH_SIZE)

    def batches() -> Iterator[tuple[Any, Any]]:
        for first in range(0, num_rows, BATCH_SIZE):
            yield inputs[first : first + BATCH_SIZE], targets[first : first + BATCH_SIZE]

    compiled, on_batch = small_model(), small_model()
    compiled.make_train_function()  # Keras's own compiled step, as `fit` calls it for each batch
    return {
        f"Keras: session calling model.train_function on a Dataset {THEIRS}": await beside(
            lambda: iter(dataset), compiled.train_function, by_fit(dataset)
        ),
        f"Keras: session calling model.train_on_batch on arrays {THEIRS}": await beside(
            batches,
            lambda epoch: on_batch.train_on_batch(*next(epoch), return_dict=True),
            by_fit(inputs, targets, batch_size=BATCH_SIZE),
        ),
    }
