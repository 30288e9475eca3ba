"""The stacks of all tasks and threads, as text for a log. It logs nothing, and never raises."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any, TypeVar

MAX_FRAMES = 30
"""Frames shown of one stack, the innermost ones: those say what is waited for."""
MAX_CHARS = 20_000
"""Length of a section; what does not fit is counted instead."""
_MAX_NAMES = 5
_MAX_DEPTH = 1000

F = TypeVar("F", bound=Callable[..., object])
_HOLDERS: dict[CodeType, Callable[[Any], str]] = {}
"""What a function calls, by its code: filled where they are defined, and read off stacks."""

_SUSPENDABLE = (CoroutineType, GeneratorType, AsyncGeneratorType)


def report(running_tasks: Callable[[], Iterable[tuple[str, object]]]) -> str:
    """The stacks of the tasks that the function names, and of all threads but the one that asks.

    Those with the same stack share one entry, so that a thousand workers fill no log.

    Args:
        running_tasks: gives (name, outermost coroutine) of each task; from any thread.
    """
    return f"{_tasks(running_tasks)}\n{_threads()}"


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
    return None, next((each for each in gc.get_referents(awaited) if _is_suspendable(each)), None)


def _driven_by(generator: GeneratorType[object, object, object]) -> object:
    """The coroutine that a generator steps by hand, as a session on a graph drives its hooks'."""
    for value in (generator.gi_frame.f_locals if generator.gi_frame else {}).values():
        if isinstance(value, CoroutineType) and _is_suspended(value):
            return value
    return None


def _is_suspended(coroutine: CoroutineType[object, object, object]) -> bool:
    return inspect.getcoroutinestate(coroutine) == inspect.CORO_SUSPENDED


def _is_suspendable(value: object) -> bool:
    return isinstance(value, _SUSPENDABLE)


def _tasks(running_tasks: Callable[[], Iterable[tuple[str, object]]]) -> str:
    try:
        return _grouped("task", ((name, _stack_of(task)) for name, task in running_tasks()))
    except Exception as error:  # a dump is a last resort: report what is possible
        return f"the tasks cannot be listed: {error!r}"


def _grouped(kind: str, stacks: Iterable[tuple[str, str]]) -> str:
    """A text with an entry for each stack, which says whose it is."""
    names_by_stack: dict[str, list[str]] = {}
    for name, stack in stacks:
        names_by_stack.setdefault(stack, []).append(name)
    return _joined(_entries(kind, names_by_stack), f"{kind}s", len(names_by_stack))


def _entries(kind: str, names_by_stack: dict[str, list[str]]) -> Iterator[str]:
    for stack, names in names_by_stack.items():
        listed = ", ".join(names[:_MAX_NAMES])
        rest = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        yield f"{kind}{'s' if len(names) > 1 else ''} {listed}{rest}:\n{stack}"


def _stack_of(coroutine: object) -> str:
    try:
        return _formatted(frames_of(coroutine))
    except Exception as error:  # e.g. it was resumed in another thread meanwhile
        return f"  (cannot be shown: {error!r})\n"


def _threads() -> str:
    try:
        names = {thread.ident or 0: thread.name for thread in threading.enumerate()}
        stacks = sys._current_frames()
        stacks.pop(threading.get_ident(), None)  # it writes this
        known = [ident for ident in names if ident in stacks]  # the main thread comes first
        idents = dict.fromkeys([*known, *stacks])
        named = [(str(names.get(ident, ident)), _thread_stack(stacks[ident])) for ident in idents]
        return _grouped("thread", named)
    except Exception as error:
        return f"the threads cannot be listed: {error!r}"


def _thread_stack(frame: FrameType) -> str:
    try:
        return _formatted([*walk(frame)][::-1])
    except Exception as error:
        return f"  (cannot be shown: {error!r})\n"


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


def _formatted(frames: list[tuple[FrameType, int]]) -> str:
    left_out = len(frames) - MAX_FRAMES
    lines = traceback.StackSummary.extract(iter(frames[-MAX_FRAMES:])).format()
    if left_out > 0:
        lines.insert(0, f"  ({left_out} outer frames are left out)\n")
    return "".join(lines) or "  (no frames: it has not started, or has just ended)\n"


def _joined(entries: Iterable[str], what: str, num: int) -> str:
    shown: list[str] = []
    num_chars = 0
    for entry in entries:
        if shown and num_chars + len(entry) > MAX_CHARS:
            break
        shown.append(entry[:MAX_CHARS])
        num_chars += len(entry)
    if len(shown) < num:
        shown.append(f"({num - len(shown)} more {what} are left out)\n")
    return "".join(shown) or f"no {what} are known\n"
