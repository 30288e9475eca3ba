"""Who holds the event loop, read off the stack of its thread.

It reads one stack at one moment, and measures nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Set
from pathlib import PurePath
from types import CodeType, FrameType

from ..._engine.stacks import walk

NOBODY = "the event loop itself"

# never the place where somebody holds the loop: what drives all tasks, and what anybody waits by
_DRIVERS = {
    "anyio", "asynchooks", "asyncio", "outcome", "queue", "selectors", "sniffio", "threading",
    "trio",
}  # fmt: skip
# by name: hooks stand below sessions, and must not import them
_SESSION, _HOOK_LIST, _SIDE_TASKS = (
    "asynchooks._session",
    "asynchooks._running.dispatch",
    "asynchooks._stopping.tasks",
)


def loop_code() -> frozenset[CodeType]:
    """The functions through which the event loop calls its tasks, and who called the loop.

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
    """(Who runs, where) on the stack that ends with this frame.

    Who: "after_run of SlowHook", "the step", "the step_fn", "the side task 'name'", "the session",
    "code outside of a run", or `NOBODY`. Where: "file.py:12 in function", the innermost code that
    belongs to no event loop; "" if there is none.

    Args:
        frame: the innermost frame of the event loop's thread.
        loop: what `loop_code` said in a task of it.
    """
    culprit = where = innermost = ""
    is_in_hook_list = False
    for each, line in walk(frame):
        module, function = each.f_globals.get("__name__") or "", each.f_code.co_name
        if each.f_code in loop:
            break
        place = f"{PurePath(each.f_code.co_filename).name}:{line} in {function}"
        innermost = innermost or place
        if not where and module.partition(".")[0] not in _DRIVERS:
            where = place
        if module == _SESSION:
            culprit = _in_session(each, function, is_in_hook_list)
        elif module == _SIDE_TASKS and function == "_supervise":
            culprit = f"the side task {each.f_locals['task'].name!r}"
        if culprit:
            break
        is_in_hook_list = is_in_hook_list or module == _HOOK_LIST
    if not culprit:
        culprit = "code outside of a run" if where else NOBODY
    return culprit, where or innermost


def _in_session(frame: FrameType, function: str, is_in_hook_list: bool) -> str:
    """Whom the session calls in this method of its own; "" if it says nothing of a session."""
    session = frame.f_locals.get("self")
    if session is None:
        return ""
    if function == "_call_step_fn":
        return "the step_fn"
    # elsewhere than in `run` the list does not say when a hook's call is over: the stack does
    if function != "run" and not is_in_hook_list:
        return "the session"
    culprit: str = session._hooks.culprit()
    return "the step" if culprit == "the session" else culprit
