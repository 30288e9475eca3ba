"""What each task waits for, as text for the error of a deadlock."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from ..._engine.base import Slot
from ..._engine.stacks import frames_of

_MAX_LINES, _MAX_NAMES = 50, 8
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("asyncio", "anyio", "trio", "outcome"))


def describe(running_tasks: Iterable[tuple[str, object]]) -> str:
    """A line for each thing that is waited for, with the tasks that wait for it, in their order.

    Args:
        running_tasks: (name, outermost coroutine) of each.
    """
    names: dict[str, list[str]] = {}
    for name, coroutine in running_tasks:
        what, place = wait_of(coroutine)
        wait = " at ".join(filter(None, (what or "a wait of another library's", place)))
        names.setdefault(wait, []).append(name)
    lines = []
    for wait, waiting in list(names.items())[:_MAX_LINES]:
        shown = ", ".join(waiting[:_MAX_NAMES])
        rest = len(waiting) - _MAX_NAMES
        lines.append(f"  {shown}{f' and {rest} more' if rest > 0 else ''}: {wait}")
    if len(names) > _MAX_LINES:
        lines.append(f"  and {len(names) - _MAX_LINES} more things are waited for")
    return "\n".join(lines) or "  (no tasks are known)"


def wait_of(coroutine: object) -> tuple[str | None, str | None]:
    """What is waited for (None: another library's wait), and where in the user's code."""
    what = place = None
    for frame, line in frames_of(coroutine):
        slot = frame.f_locals.get("slot")
        if isinstance(slot, Slot):
            what = slot.what
        elif frame.f_code.co_name == "sleep" and frame.f_code.co_filename.startswith(_PACKAGE):
            what = "the end of a sleep that has none"
        if is_users(frame):
            place = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
    return what, place


def is_users(frame: FrameType) -> bool:
    """Whether it runs the user's code, rather than asynchooks's or an event loop's."""
    path = frame.f_code.co_filename
    return not (path.startswith((_PACKAGE, "<frozen")) or any(part in path for part in _LIBRARIES))
