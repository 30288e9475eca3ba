"""The stacks of all tasks and threads, as text for a log. It logs nothing, and never raises."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType

from ..._engine.stacks import frames_of, walk

MAX_FRAMES = 30
"""Frames shown of one stack, the innermost ones: those say what is waited for."""
MAX_CHARS = 20_000
"""Length of a section; what does not fit is counted instead."""
_MAX_NAMES = 5


def report(running_tasks: Callable[[], Iterable[tuple[str, object]]]) -> str:
    """The stacks of the tasks that the function names, and of all threads but the one that asks.

    Those with the same stack share one entry, so that a thousand workers fill no log.

    Args:
        running_tasks: gives (name, outermost coroutine) of each task; from any thread.
    """
    return f"{_section('task', lambda: _tasks(running_tasks))}\n{_section('thread', _threads)}"


Stacks = Iterable[tuple[str, Callable[[], list[tuple[FrameType, int]]]]]
"""Of each task or thread: its name, and what finds its frames."""


def _tasks(running_tasks: Callable[[], Iterable[tuple[str, object]]]) -> Stacks:
    return [(name, partial(frames_of, task)) for name, task in running_tasks()]


def _threads() -> Stacks:
    stacks = sys._current_frames()
    stacks.pop(threading.get_ident(), None)  # it writes this
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    known = [ident for ident in names if ident in stacks]  # the main thread comes first
    for ident in dict.fromkeys([*known, *stacks]):
        yield str(names.get(ident, ident)), partial(_outermost_first, stacks[ident])


def _outermost_first(frame: FrameType) -> list[tuple[FrameType, int]]:
    return [*walk(frame)][::-1]


def _section(kind: str, stacks: Callable[[], Stacks]) -> str:
    """A text of bounded length with an entry for each stack, which says whose it is."""
    names_by_stack: dict[str, list[str]] = {}
    try:
        for name, frames in stacks():
            names_by_stack.setdefault(_formatted(frames), []).append(name)
        return _joined(kind, names_by_stack)
    except Exception as error:  # a dump is a last resort: report what is possible
        return f"the {kind}s cannot be listed: {error!r}"


def _joined(kind: str, names_by_stack: dict[str, list[str]]) -> str:
    text = ""
    num_left = len(names_by_stack)
    for stack, names in names_by_stack.items():
        rest = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        listed = ", ".join(names[:_MAX_NAMES]) + rest
        entry = f"{kind}{'s' if len(names) > 1 else ''} {listed}:\n{stack}"
        if text and len(text) + len(entry) > MAX_CHARS:
            return f"{text}({num_left} more {kind}s are left out)\n"
        text += entry[:MAX_CHARS]
        num_left -= 1
    return text or f"no {kind}s are known\n"


def _formatted(find: Callable[[], list[tuple[FrameType, int]]]) -> str:
    try:
        frames = find()
        lines = traceback.StackSummary.extract(iter(frames[-MAX_FRAMES:])).format()
    except Exception as error:  # e.g. it was resumed in another thread meanwhile
        return f"  (cannot be shown: {error!r})\n"
    if len(frames) > MAX_FRAMES:
        lines.insert(0, f"  ({len(frames) - MAX_FRAMES} outer frames are left out)\n")
    return "".join(lines) or "  (no frames: it has not started, or has just ended)\n"
