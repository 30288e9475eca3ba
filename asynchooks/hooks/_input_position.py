"""InputPositionHook: saves the position of an input that the training loop itself reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .._errors import InputStateError
from .._hook import SessionRunHook
from .._log import fields
from .._running.hook_state import SharedState
from ..data._consumers import Consumers, consumers_of, consumers_of_last_stage
from ..data._stage import Stage

logger = logging.getLogger("asynchooks")


class InputPositionHook(SessionRunHook):
    """Saves the position of a pipeline that the training loop itself reads.

    Items of `session.batches(source)` count as used when the run behind them has ended, in the
    session of any worker, and a checkpoint holds the position behind them: list this hook
    together with the CheckpointSaverHook. (`FeedHook` does so for what it feeds.)

    Args:
        source: the stage that `session.batches` is given.

    Raises:
        TypeError: it is not a stage.
        ValueError: another stage reads it: the position would be ahead of what was used.

    Example:
        source = prefetch(batch(records, 32), 2)
        saving = CheckpointSaverHook("model", save_steps=1000, saver=saver)
        async with MonitoredSession([InputPositionHook(source), saving], creator) as session:
            async for images in session.batches(source):
                await session.run("loss", {"images": images})
    """

    uses_default_graph = False
    _shown = (("source", "_consumers.stage"),)

    def __init__(self, source: Stage[Any]) -> None:
        self._consumers = consumers_of_last_stage(source, "InputPositionHook")

    def state_dict(self) -> dict[str, Any]:
        return saved_position(self._consumers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._consumers.load_state_dict(state)


def saved_position(consumers: Consumers, place: str = "") -> dict[str, Any]:
    """The position, of a hook at this place; {} and one warning where the pipeline has none."""
    try:
        state = SharedState(consumers.state_dict(), place=place)
        state.when_saved = consumers.stage._when_saved()
    except InputStateError as error:
        if not consumers.has_warned:
            consumers.has_warned = True
            extra = fields(reason=error)
            logger.warning("The position in the input is not saved: %s", error, extra=extra)
        return {}
    return state


def warn_of_unsaved_input(stage: Stage[Any]) -> None:
    """Say once that workers draw items of a stage whose position no hook saves."""
    consumers = consumers_of(stage)
    if not (consumers.is_saved or consumers.has_warned):
        consumers.has_warned = True
        logger.warning(
            "A worker draws items from %r, whose position is in no checkpoint: they come once more "
            "when training is resumed. Let all workers read one stage, or list "
            "InputPositionHook(stage) beside the CheckpointSaverHook",
            stage,
        )
