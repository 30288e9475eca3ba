"""LightningHooks: hooks in Lightning's Trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from anyio.from_thread import BlockingPortal

from .._hook import AnyHook
from ._driver import LoopDriver, TrainerSession

if "lightning.pytorch" in sys.modules:  # the same library has two names
    from lightning.pytorch.callbacks import Callback
else:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError:
        from lightning.pytorch.callbacks import Callback

_LEAVE_OUT = -1
"""Lightning then leaves out a batch, and the rest of the epoch."""


class LightningHooks(Callback):  # type: ignore[misc]
    """A Lightning callback that calls hooks around each training batch of `Trainer.fit`.

    Fetches are names of what `training_step` returns ("loss") and of what the module logs. The
    global step is `trainer.global_step`, the optimizer's steps: with `accumulate_grad_batches=4` it
    moves once in four batches. A hook that asks to stop, a StopAtStepHook at its step, and the end
    of a hook's input end `fit` after the batch. States of hooks are in Lightning's checkpoints, and
    `fit(ckpt_path=...)` gives them back. With several processes each has its own hooks: let them
    stop by the step alone.

    Args:
        hooks: an iterable of `SessionRunHook`; may be used for one `fit` after the other.
        portal: anyio's blocking portal to an event loop of yours; None starts one (asyncio).

    Raises:
        BaseException: out of `fit`: what a hook raised, with a note of which it was.

    Example:
        hooks = LightningHooks([NanTensorHook("loss"), StopAtStepHook(last_step=1000)])
        trainer = pytorch_lightning.Trainer(callbacks=[hooks])
    """

    def __init__(self, hooks: Iterable[AnyHook], *, portal: BlockingPortal | None = None) -> None:
        super().__init__()
        self._driver = LoopDriver(hooks, portal, "Lightning")
        self._loads_states = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def request_stop() -> None:
            trainer.should_stop = True

        self._driver.begin(
            TrainerSession(
                lambda: int(trainer.global_step),
                request_stop,
                "Lightning",
                trainer=trainer,
                model=pl_module,
            )
        )

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> int | None:
        return None if self._driver.before_step() else _LEAVE_OUT

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        given = dict(outputs) if isinstance(outputs, Mapping) else {"loss": outputs}
        self._driver.after_step({**trainer.callback_metrics, **given})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._driver.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._driver.fail(exception)

    def state_dict(self) -> dict[str, Any]:
        return {"hooks": self._driver.state()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Training does not go on from the states that `test(ckpt_path=...)` and the like load."""
        self._loads_states = trainer.state.fn == "fit"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._loads_states:
            self._driver.resume_from(state_dict["hooks"])
