"""CheckpointSaverListener: what is told of each checkpoint."""

from __future__ import annotations

from typing import Any


class CheckpointSaverListener:
    """Acts before and after a checkpoint is saved; override the coroutines you need.

    You make it and give it to a `CheckpointSaverHook`. A plain method (`def`) runs in a thread,
    but `begin`, which runs on the event loop. While `before_save` runs, nobody who shares the model
    runs a step, and, on a graph without `background` and with a saver that takes no snapshot, while
    `after_save` does: do not run one there. Elsewhere `after_save` comes when the checkpoint is
    written, beside the steps, so that a plain one must not touch what they train; of a copy that
    was superseded it never does.

    Source: TensorFlow's `tf.compat.v1.train.CheckpointSaverListener`.

    Example:
        class Upload(CheckpointSaverListener):
            async def after_save(self, session, global_step_value):
                await upload(f"model.ckpt-{global_step_value}")
    """

    async def begin(self) -> None:
        """Called once, in the hook's begin; may still add ops to the graph."""

    async def before_save(self, session: Any, global_step_value: int) -> None:
        """Called before each save, also the one at the start."""

    async def after_save(self, session: Any, global_step_value: int) -> bool | None:
        """Called after each save; True asks to stop training, if a run came before."""

    async def end(self, session: Any, global_step_value: int) -> None:
        """Called once at a clean end, after the last save."""
