"""Says what was trained and is in no checkpoint, as training ends."""

from __future__ import annotations

import logging

from ..._engine.current import current_engine
from ..._errors import shown
from ..._log import fields

logger = logging.getLogger("asynchooks")

_SAVES = (
    "To keep such steps, end training by session.request_stop(), or by a Ctrl-C or signal that a "
    "PreemptionHook() handles: both save the last step"
)


def warn_of_unsaved(directory: str, saved: int, step: int, error: BaseException | None) -> None:
    """Training has ended without a last checkpoint; `error` is None for a dropped session."""
    if error is None:
        cause = "A session was dropped"
    elif not isinstance(error, GeneratorExit) and current_engine().failure_in(error) is None:
        cause = "Training was cancelled"
    else:
        cause = f"Training was ended by {shown(error)}"
    # a smaller interval helps against any error; nothing more helps against one of a step
    is_exit = not isinstance(error, Exception)
    advice = _SAVES if is_exit else "Save more often to lose fewer"
    if error is None:
        advice = "To keep such steps, open sessions by `async with`, or `await session.close()`"
    logger.warning(
        "%s at step %d. The newest checkpoint in %s is of step %d: %d step%s not saved. %s",
        cause,
        step,
        directory,
        saved,
        step - saved,
        " is" if step - saved == 1 else "s are",
        advice,
        extra=fields("CheckpointSaverHook", step=step, reason=error),
    )
