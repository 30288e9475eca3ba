"""The frames of tasks and threads, and whose code a function calls. It formats nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any, TypeVar

_MAX_DEPTH = 1000

F = TypeVar("F", bound=Callable[..., object])
_HOLDERS: dict[CodeType, Callable[[Any], str]] = {}
"""What a function calls, by its code: filled where they are defined, and read off stacks."""


def frames_of(awaited: object) -> list[tuple[FrameType, int]]:
    """The frames of a chain of awaits and their lines, from the outermost coroutine inwards.

    It ends at what is no coroutine or generator: a future, a trap of the event loop. What runs
    at this moment ends it, too: its stack is that of its thread.
    """
    frames: list[tuple[FrameType, int]] = []
    seen: set[int] = set()
    while awaited is not None and id(awaited) not in seen and len(seen) < _MAX_DEPTH:
        seen.add(id(awaited))
        frame, awaited = _step_into(awaited)
        if frame is not None:
            frames.append((frame, _line_of(frame)))
    return frames


def _step_into(awaited: object) -> tuple[FrameType | None, object]:
    """(Its frame, if it has one, and what it awaits)."""
    if isinstance(awaited, CoroutineType):
        return awaited.cr_frame, awaited.cr_await
    if isinstance(awaited, AsyncGeneratorType):
        return awaited.ag_frame, awaited.ag_await
    if isinstance(awaited, GeneratorType):
        is_driver = awaited.gi_yieldfrom is None and awaited.gi_suspended
        return awaited.gi_frame, _driven_by(awaited) if is_driver else awaited.gi_yieldfrom
    # `async for` and `coroutine.__await__()` put an object between that shows what it holds
    # to the garbage collector alone
    kinds = (CoroutineType, GeneratorType, AsyncGeneratorType)
    return None, next((each for each in gc.get_referents(awaited) if isinstance(each, kinds)), None)


def _driven_by(generator: GeneratorType[object, object, object]) -> object:
    """The coroutine that a generator steps by hand, as a session on a graph drives its hooks'."""
    values = generator.gi_frame.f_locals.values() if generator.gi_frame else ()
    coroutines = [each for each in values if isinstance(each, CoroutineType)]
    return next((each for each in coroutines if each.cr_suspended), None)


def walk(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of a thread's stack and their lines, from the innermost outwards."""
    while frame is not None:
        yield frame, _line_of(frame)
        frame = frame.f_back


def holds_loop(name: Callable[[Any], str]) -> Callable[[F], F]:
    """Record how a function calls code of users: `name` says whose, given its first argument.

    The function stays as it is, so that recording costs its calls nothing.
    """

    def record(fn: F) -> F:
        _HOLDERS[fn.__code__] = name
        return fn

    return record


def holder_in(frame: FrameType) -> str:
    """Whose code the function of this frame calls; "" if that is not recorded."""
    name = _HOLDERS.get(frame.f_code)
    if name is None:
        return ""
    first = frame.f_locals.get(frame.f_code.co_varnames[0])
    return "" if first is None else name(first)


def _line_of(frame: FrameType) -> int:
    line: int | None = frame.f_lineno  # None where the compiler made code of no line
    return frame.f_code.co_firstlineno if line is None else line
