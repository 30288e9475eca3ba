"""Signals that wake asyncio's loop: it hears them by itself only after add_signal_handler."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import suppress


def wake_on_signals(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Let Python's signals wake the loop, unless somebody hears them already; returns how to end.

    Only in the main thread. A loop that cannot watch a socket (Windows' proactor, which looks at
    signals by itself) is left alone.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    def stop() -> None:
        with suppress(NotImplementedError, RuntimeError):  # RuntimeError: the loop is closed
            loop.remove_reader(ours)
        current = signal.set_wakeup_fd(-1)
        if current != theirs.fileno():  # somebody took over
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
