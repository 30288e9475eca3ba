"""What holds the event loop, read off the stack of its thread.

It reads one stack at one moment, and measures nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Set
from pathlib import PurePath
from types import CodeType, FrameType

from ..._engine.stacks import holder_in, walk

LOOP_ITSELF = "the event loop itself"

# never the place that holds the loop: what drives all tasks, and what they wait by
_DRIVERS = {
    "anyio", "asynchooks", "asyncio", "outcome", "queue", "selectors", "sniffio", "threading",
    "trio",
}  # fmt: skip


def loop_code() -> frozenset[CodeType]:
    """The functions through which the event loop calls its tasks, and the callers of the loop.

    To be called in a task. They differ from loop to loop, and in a guest run they are the host's.
    """
    outer: list[CodeType] = []
    for frame, _ in walk(inspect.currentframe()):
        if frame.f_code.co_flags & inspect.CO_COROUTINE:
            outer = []
        else:
            outer.append(frame.f_code)
    return frozenset(outer)


def holder_of(frame: FrameType | None, loop: Set[CodeType]) -> tuple[str, str]:
    """(What runs, where) on the stack that ends with this frame.

    What: "after_run of SlowHook", "the step", "the step_fn", "the side task 'name'", "the session",
    "code outside of a run", or `LOOP_ITSELF`. Where: "file.py:12 in function", the innermost code
    that belongs to no event loop; "" if there is none.

    Args:
        frame: the innermost frame of the event loop's thread.
        loop: what `loop_code` said in a task of it.
    """
    culprit = where = innermost = ""
    for each, line in walk(frame):
        if each.f_code in loop or culprit:
            break
        module, function = each.f_globals.get("__name__") or "", each.f_code.co_name
        place = f"{PurePath(each.f_code.co_filename).name}:{line} in {function}"
        innermost = innermost or place
        if not where and module.partition(".")[0] not in _DRIVERS:
            where = place
        culprit = holder_in(each)
    if not culprit:
        culprit = "code outside of a run" if where else LOOP_ITSELF
    return culprit, where or innermost
