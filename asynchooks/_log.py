"""What the records of the logger `asynchooks` carry, and which of them are seen by default.

It configures nothing: it adds no handler and sets no level, neither at the import nor later.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("asynchooks")


def fields(
    hook: object = None,
    *,
    step: int | None = None,
    worker: int | None = None,
    reason: object = None,
) -> dict[str, Any]:
    """The attributes of a record, for `extra=`: those that are known, and no others.

    Numbers and texts only, which every formatter for structured logs can write.

    Args:
        hook: the hook that logs, or the name of its class.
        step: the global step.
        worker: the number of the session's worker.
        reason: why: what a stop was requested for, or the error that led to the record.
    """
    found: dict[str, Any] = {}
    if hook is not None:
        found["hook"] = hook if isinstance(hook, str) else type(hook).__name__
    if step is not None:
        found["step"] = int(step)
    if worker is not None:
        found["worker"] = worker
    if reason is not None:
        found["reason"] = str(reason)
    factory = logging.getLogRecordFactory()
    if factory is logging.LogRecord:
        return found
    # `extra` must not set what a record has already: the KeyError would end training
    taken = vars(factory(logger.name, logging.INFO, "", 0, "", (), None))
    return {name: value for name, value in found.items() if name not in taken}


def is_shown() -> bool:
    """Whether `show` has an effect now."""
    return logger.isEnabledFor(logging.INFO) or not _is_configured()


def show(
    hook: object,
    message: str,
    *args: object,
    step: int,
    worker: int | None = None,
    says_step: bool = False,
) -> None:
    """Log at level INFO what a hook was asked to print.

    Where logging is not configured, the line goes to standard error, behind its step, by
    `logging.lastResort`, which writes warnings there and would not be asked for INFO.

    Args:
        says_step: whether the message names the step itself.
    """
    if _is_configured():
        logger.info(message, *args, extra=fields(hook, step=step, worker=worker), stacklevel=2)
        return
    labels = [] if worker is None else [f"worker {worker}"]
    labels += [] if says_step else [f"step {step}"]
    prefix = f"{', '.join(labels)}: " if labels else ""
    assert logging.lastResort is not None
    logging.lastResort.handle(logging.makeLogRecord({"msg": prefix + message, "args": args}))


def _is_configured() -> bool:
    """Whether the program has set anything that decides about INFO records of this logger."""
    return (
        logger.level != logging.NOTSET
        or logger.getEffectiveLevel() != logging.WARNING  # the default of the root
        or logger.hasHandlers()
        or not logger.propagate
        or logger.disabled
        or bool(logger.filters)
        or logger.manager.disable >= logging.INFO  # logging.disable
        or logging.lastResort is None  # the program wants no output by default
    )
