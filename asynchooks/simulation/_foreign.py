"""Awaits that the turbo kernel cannot take, and how it says which they are."""

from __future__ import annotations

import traceback
from typing import Any

from .._errors import ForeignAwaitError
from .._stacks import frames_of
from ._waits import is_users

_WORDS = (
    "no running event loop",
    "must be called from async context",
    "not currently running on any asynchronous event loop",
    "unknown async library",
)


_NO_LOOP = ("has no attribute 'create_future'", "'runcontext' object has no attribute")
"""What asyncio's and trio's own code stumbles over where no event loop runs."""


def foreign_await(coroutine: Any, yielded: object) -> ForeignAwaitError:
    """The error for a coroutine that is suspended at something else than asynchooks's waits."""
    places = [(frame, line) for frame, line in frames_of(coroutine) if is_users(frame)]
    place = ""
    if places:
        frame, line = places[-1]
        place = f" at {frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
    return _error(f"it awaits {type(yielded).__name__}{place}")


def foreign_error(error: BaseException) -> BaseException:
    """The error, or what it becomes if another library's wait failed for want of an event loop."""
    text = str(error).lower()
    is_foreign = type(error).__name__ in ("NoEventLoopError", "AsyncLibraryNotFoundError") or (
        (type(error) is RuntimeError and any(words in text for words in _WORDS))
        or (type(error) is AttributeError and any(words in text for words in _NO_LOOP))
    )
    if not is_foreign:
        return error
    frames = [each for each in traceback.walk_tb(error.__traceback__) if is_users(each[0])]
    place = ""
    if frames:
        frame, line = frames[-1]
        place = f" at {frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
    foreign = _error(f"{type(error).__name__}: {error}{place}")
    foreign.__cause__ = error
    return foreign


def _error(what: str) -> ForeignAwaitError:
    return ForeignAwaitError(
        f'backend "turbo" could not take an await: {what}. It takes waits of asynchooks only '
        '(sleep, global_step.wait_for, hooks, workers); use backend="asyncio" or "trio" for others.'
    )
