"""Counts the timers that fire in the running event loop; it sets none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import anyio.lowlevel
import trio


class TimerCount(trio.abc.Instrument):
    """How many timers have fired; as a trio instrument, how often trio slept for a deadline."""

    def __init__(self) -> None:
        self.fired = 0

    def counting(self, set_timer: Callable[..., Any]) -> Callable[..., Any]:
        """The event loop's method that sets a timer, with its callbacks counted."""

        def wrapped(when: float, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def fire(*callback_args: Any) -> None:
                self.fired += 1
                callback(*callback_args)

            return set_timer(when, fire, *args, **kwargs)

        return wrapped

    def before_io_wait(self, timeout: float) -> None:
        # 0 when a task is ready, a day when there is no deadline
        self.fired += 0 < timeout < 3600


@contextmanager
def counted_timers() -> Iterator[TimerCount]:
    """Count the timers that are set, and fire, within the block; on asyncio, uvloop and trio."""
    count = TimerCount()
    loop: Any = anyio.lowlevel.current_token().native_token
    if isinstance(loop, asyncio.AbstractEventLoop):
        # asyncio sets all of them by call_at, uvloop by call_later
        name = "call_at" if isinstance(loop, asyncio.BaseEventLoop) else "call_later"
        with mock.patch.object(loop, name, count.counting(getattr(loop, name))):
            yield count
        return
    trio.lowlevel.add_instrument(count)
    try:
        yield count
    finally:
        trio.lowlevel.remove_instrument(count)
