"""What a guard that heeds signals needs of asyncio's event loop; on trio there is nothing to do."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..._engine.base import Engine


def wake_on_signals(engine: Engine) -> Callable[[], None]:
    """Let a signal that any thread of the process gets wake the loop; returns what ends that.

    Without it the loop may sleep on until its next timer, and Python's handler waits for that.
    Only in the main thread. A loop that signals wake already, or that cannot watch a socket
    (Windows' proactor, which looks at signals by itself), is left alone.
    """
    loop = engine.event_loop
    if loop is None:
        return lambda: None
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    def stop() -> None:
        with suppress(NotImplementedError, RuntimeError):  # RuntimeError: the loop is closed
            loop.remove_reader(ours)
        current = signal.set_wakeup_fd(-1)
        if current != theirs.fileno():  # replaced meanwhile
            signal.set_wakeup_fd(current)
        ours.close()
        theirs.close()

    try:
        loop.add_reader(ours, ours.recv, 4096)
    except NotImplementedError:
        stop()
        return lambda: None
    found = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    if found != -1:  # uvloop, or asyncio after add_signal_handler
        signal.set_wakeup_fd(found)
        stop()
        return lambda: None
    return stop


def expect_exit(engine: Engine, error: BaseException) -> BaseException:
    """The exit, which may then pass through tasks of the loop without a report of a bug.

    asyncio's loop is left by an exit at once, so that none asks the tasks that it has passed
    through for their errors; each task would be reported when it is freed.
    """
    loop = engine.event_loop
    if loop is None:
        return error
    report = loop.get_exception_handler()

    def handle(loop: Any, context: dict[str, Any]) -> None:
        found = context.get("exception")
        if isinstance(found, BaseExceptionGroup):
            found = error if found.split(lambda each: each is error)[1] is None else found
        if found is error:
            return
        if report is None:
            loop.default_exception_handler(context)
        else:
            report(loop, context)

    loop.set_exception_handler(handle)
    return error
