"""Event loops of asyncio that start their tasks at once, which Python has since 3.12."""

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

Backend = str | tuple[str, dict[str, Any]]
"""Of anyio, with its options."""


class OwnTask(asyncio.Task[Any]):
    """What a program's own task factory makes."""


def eager_backends() -> list[Any]:
    """Backends with eager tasks, as parameters; skipped where this Python has none.

    On asyncio with Python's own factory, with one of a program's own, and on uvloop.
    """
    is_missing = sys.version_info < (3, 12)
    loops = {
        "eager": (asyncio.new_event_loop, asyncio.Task, is_missing),
        "own eager": (asyncio.new_event_loop, OwnTask, is_missing),
        "eager uvloop": (_uvloop, asyncio.Task, not _has_eager_uvloop()),
    }
    return [
        pytest.param(
            ("asyncio", {"loop_factory": partial(_eager, new_loop, task_type)}),
            id=name,
            marks=pytest.mark.skipif(
                is_skipped,
                reason="there are no eager tasks with these versions of Python and uvloop",
            ),
        )
        for name, (new_loop, task_type, is_skipped) in loops.items()
    ]


def make_tasks_eager() -> None:
    """From now on every new event loop of this process has the eager task factory.

    Raises:
        RuntimeError: this version of Python has none.
    """
    if sys.version_info < (3, 12):
        raise RuntimeError("--eager-tasks needs Python 3.12 or later; leave it out")
    _make_eager(asyncio.BaseEventLoop)
    if _has_eager_uvloop():
        import uvloop

        _make_eager(uvloop.Loop)


def _make_eager(loop_type: Any) -> None:
    make = loop_type.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.set_task_factory(_factory(asyncio.Task))

    loop_type.__init__ = made


def _factory(task_type: type[asyncio.Task[Any]]) -> Any:
    # by name, as mypy reads the library of Python 3.11; anyio knows Python's own factories alone
    lacking: Any = asyncio
    if task_type is asyncio.Task:
        return lacking.eager_task_factory
    return lacking.create_eager_task_factory(task_type)


def _eager(
    new_loop: Callable[[], asyncio.AbstractEventLoop], task_type: type[asyncio.Task[Any]]
) -> asyncio.AbstractEventLoop:
    loop = new_loop()
    loop.set_task_factory(_factory(task_type))
    return loop


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _has_eager_uvloop() -> bool:
    """Whether uvloop calls the factory as this version of Python has it.

    uvloop 0.23 gives it `eager_start`, which that of Python 3.13.0 does not take.
    """
    if sys.version_info < (3, 12) or find_spec("uvloop") is None:
        return False
    loop = _eager(_uvloop, asyncio.Task)
    coroutine = asyncio.sleep(0)
    try:
        loop.run_until_complete(coroutine)
    except TypeError:
        coroutine.close()
        return False
    finally:
        loop.close()
    return True
