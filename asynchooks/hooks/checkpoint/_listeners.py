"""CheckpointSaverListener, and the calls of one hook's listeners, in order."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ..._engine.current import current_engine
from ..._errors import add_note, is_stop
from ..._log import fields
from ..._stopping.session_stop import SessionStop
from ...backends._raw_session import raw_session_of

logger = logging.getLogger("asynchooks")


class CheckpointSaverListener:
    """Acts before and after a checkpoint is saved; override the coroutines you need.

    You make it and give it to a `CheckpointSaverHook`. A plain method (`def`) runs in a thread,
    but `begin`, which runs on the event loop. No worker that shares the model runs a step during
    `before_save`, nor, on a graph without `background` or with a saver that takes no snapshot,
    during `after_save`: do not run one there. Elsewhere `after_save` comes when the checkpoint is
    written, while steps run, so that a plain one must not touch what they train.

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


class Listeners:
    """The `CheckpointSaverListener`s of a hook, in order; coroutines here, the others in a thread.

    Where the session is being stopped, waits of asynchooks in them raise StopTraining; a listener
    that lets it out counts as called.
    """

    def __init__(self, listeners: Iterable[Any] | None) -> None:
        self._listeners = [_checked(listener) for listener in listeners or ()]
        self._stop: SessionStop | None = None

    async def begin(self, stop: SessionStop | None) -> None:
        """Call `begin` of all, in a session that has this stop."""
        self._stop = stop
        for listener in self._listeners:
            result = listener.begin()
            if isinstance(result, Awaitable):
                await result

    async def before_save(self, session: Any, step: int) -> None:
        self._log("before", step)
        for listener in self._listeners:
            await self._call(session, listener.before_save, step, is_alone=True)

    async def after_save(self, session: Any, step: int) -> bool:
        """Returns whether one of them wants training to stop."""
        self._log("after", step)
        should_stop = False
        for listener in self._listeners:
            if await self._call(session, listener.after_save, step):
                text = "A CheckpointSaverListener requested that training be stopped. listener: %s"
                logger.info(text, listener, extra=fields("CheckpointSaverHook", step=step))
                should_stop = True
        return should_stop

    def _log(self, when: str, step: int) -> None:
        if self._listeners:
            text = "Calling checkpoint listeners %s saving checkpoint %d..."
            logger.info(text, when, step, extra=fields("CheckpointSaverHook", step=step))

    async def end(self, session: Any, step: int) -> None:
        for listener in self._listeners:
            await self._call(session, listener.end, step)

    async def _call(
        self, session: Any, method: Callable[..., Any], step: int, *, is_alone: bool = False
    ) -> Any:
        name = getattr(method, "__qualname__", method)
        try:
            return await raw_session_of(session).call(method, session, step, is_alone=is_alone)
        except BaseException as error:
            stop = self._stop
            is_stopping = stop is not None and (stop.is_set or stop.run_stop.is_set)
            if is_stopping and is_stop(error):
                logger.info(
                    "The listener's %s at step %d was not finished: %s",
                    name,
                    step,
                    error,
                    extra=fields("CheckpointSaverHook", step=step, reason=error),
                )
                return None
            if current_engine().failure_in(error) is not None:
                add_note(error, f"in the listener's {name}")
            raise


def _checked(listener: Any) -> Any:
    methods = ("begin", "before_save", "after_save", "end")
    if not isinstance(listener, type) and all(hasattr(listener, each) for each in methods):
        return listener
    raise TypeError(
        f"listeners holds {listener!r}; give instances of asynchooks.CheckpointSaverListener, of "
        f"TensorFlow's, or with its methods {', '.join(methods)}"
    )
