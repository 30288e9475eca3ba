"""FinalOpsHook: values at the end of training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .._errors import passes_for_input_end
from .._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from .._log import fields
from .._stopping.coordinator import Coordinator
from ..backends._raw_session import raw_session_of

logger = logging.getLogger("asynchooks")


class FinalOpsHook(SessionRunHook):
    """Computes values at a clean end, while the session is open: `final_ops_values` holds them.

    A step function gives the outputs of its last run: calling it would be one more training step.

    Args:
        final_ops: what to compute, as for `session.run`; None computes nothing.
        final_ops_feed_dict: what to feed then; for graphs only.

    Raises:
        tf.errors.OutOfRangeError: at the end: the ops read an input that has ended; a warning
            explains it.
        ValueError: when opening: a feed_dict was given for a step function.

    Source: TensorFlow's `tf.compat.v1.train.FinalOpsHook`.

    Example:
        final = FinalOpsHook("accuracy")  # on a graph: FinalOpsHook(accuracy, {images: held_out})
        async with MonitoredSession([final], creator) as session:
            await session.run("loss")
        print(final.final_ops_values)
    """

    uses_default_graph = False
    needs_session_in_begin = False
    _shown = (("final_ops", "_final_ops"),)

    def __init__(
        self, final_ops: Any, final_ops_feed_dict: Mapping[Any, Any] | None = None
    ) -> None:
        self._final_ops = final_ops
        self._feed_dict = final_ops_feed_dict
        self._keeps_last = False
        self._last: Any = None
        self._values: Any = None

    @property
    def final_ops_values(self) -> Any:
        """The values, nested as `final_ops`; None before the end."""
        return self._values

    async def begin(self) -> None:
        self._last = self._values = None

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._keeps_last = not raw_session_of(session).evaluates and self._final_ops is not None
        if self._keeps_last and self._feed_dict:
            raise ValueError(
                f"FinalOpsHook got the feed_dict {self._feed_dict!r}, but this session cannot "
                "compute anything without a training step; leave the feed_dict out, or evaluate in "
                "the `end` of a hook of your own"
            )

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return SessionRunArgs(self._final_ops) if self._keeps_last else None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._keeps_last:
            self._last = run_values.results

    async def end(self, session: Any) -> None:
        if self._keeps_last:
            self._values = self._last
        elif self._final_ops is not None:
            raw = raw_session_of(session)
            try:
                self._values = await raw.evaluate(self._final_ops, self._feed_dict)
            except Exception as error:
                if passes_for_input_end(error):
                    logger.warning(
                        "The ops %r of FinalOpsHook read an input that has ended. Give it ops "
                        "that depend on variables only, such as the value of a metric rather than "
                        "its update",
                        self._final_ops,
                        extra=fields(self, step=raw.global_step.last_known, reason=repr(error)),
                    )
                raise
