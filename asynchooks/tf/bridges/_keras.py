"""HooksCallback: hooks in Keras's `model.fit`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from ..._hook import AnyHook
from ...adapters._driver import LoopDriver, TrainerSession, TrainingBlock
from ...adapters._portal import BlockingPortal


class HooksCallback(TrainingBlock, keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback that calls hooks around each batch of `model.fit`.

    Fetches are names of Keras's logs ("loss" and the metrics, means over the epoch so far), nested
    as you like. The global step is the optimizer's count of iterations. A hook that asks to stop,
    a StopAtStepHook at its step, and the end of a hook's input end `fit` after the batch. The
    coroutines run in an event loop in a thread while `fit` waits, each moment in a task of its
    own. Hooks that need a graph, feeds and run options do not work here; Keras makes and restores
    the model itself, so `restore_model` and `on_drop` are not called. Where
    training ends before a batch (the input of a hook, or a StopAtStepHook that finds its step there
    already), Keras warns that its own input ran out of data.

    `with HooksCallback(hooks) as callback:` around `fit` calls `on_error` of hooks when `fit`
    fails; without it they get only their own errors.

    Args:
        hooks: an iterable of `SessionRunHook`; may be used for one `fit` after the other.
        portal: anyio's blocking portal to an event loop of yours; None starts one (asyncio).

    Raises:
        BaseException: out of `fit`: what a hook raised, with a note of which it was.

    Example:
        model.fit(x, y, epochs=5, callbacks=[HooksCallback([NanTensorHook("loss")])])
    """

    def __init__(self, hooks: Iterable[AnyHook], *, portal: BlockingPortal | None = None) -> None:
        super().__init__()
        self._driver = LoopDriver(hooks, portal, "Keras")

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model

        def request_stop() -> None:
            model.stop_training = True

        self._driver.begin(
            TrainerSession(
                lambda: int(model.optimizer.iterations), request_stop, "Keras", model=model
            )
        )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._driver.before_step(is_late=True):
            raise StopIteration  # Keras ends the epoch without this batch, and warns

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._driver.after_step(logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        self._driver.end()
