"""Coroutine hooks for callers that block: an event loop in a thread beside them."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal

from .._check import instance
from .._engine.current import current_engine
from .._stopping.coordinator import Coordinator

__all__ = ["GRACE_SECS", "BlockingPortal", "HookPortal", "end_side_tasks"]

GRACE_SECS = 120.0
"""Time for side tasks to stop at the end, and for on_error of hooks."""
_LOOK_SECS = 0.1
"""Between two calls of `meanwhile`."""
_JOIN_SECS = 1.0


class HookPortal:
    """An event loop in which a blocking caller has coroutines run, one after the other.

    A portal that is given stays open. None starts an event loop (asyncio) in a daemon thread, so
    that a caller that never closes it does not keep the process from ending.
    """

    def __init__(self, portal: BlockingPortal | None = None) -> None:
        expected = "one that anyio.from_thread.start_blocking_portal opened, or None"
        self._given = (
            None if portal is None else instance("portal", portal, BlockingPortal, expected)
        )
        self._own: tuple[BlockingPortal, threading.Thread, Callable[[], object]] | None = None
        """Its portal, its thread, and what ends it."""

    @property
    def portal(self) -> BlockingPortal:
        if self._given is not None:
            return self._given
        if self._own is None:
            opened: queue.SimpleQueue[BlockingPortal] = queue.SimpleQueue()
            thread = threading.Thread(
                target=anyio.run, args=(_serve, opened), name="asynchooks-hooks", daemon=True
            )
            thread.start()
            portal = opened.get()
            end = weakref.finalize(self, portal.start_task_soon, portal.stop, True)
            self._own = portal, thread, end
        return self._own[0]

    def call(
        self,
        fn: Callable[..., Awaitable[Any]],
        *args: Any,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """Have `fn(*args)` run there, and block until it has ended; raises what it raised.

        `meanwhile` is called here about every tenth of a second while it runs.
        """
        future = self.portal.start_task_soon(fn, *args)
        try:
            while meanwhile is not None and not wait([future], timeout=_LOOK_SECS).done:
                meanwhile()
            return future.result()
        finally:  # interrupted: it must not go on beside what the caller does next
            future.cancel()

    def close(self) -> None:
        """End the event loop and what still runs in it; the next call starts another."""
        own, self._own = self._own, None
        if own is not None:
            _, thread, end = own
            end()
            thread.join(_JOIN_SECS)  # a task that shields itself is left alone


async def _serve(opened: queue.SimpleQueue[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        opened.put(portal)
        await portal.sleep_until_stopped()


async def end_side_tasks(coord: Coordinator) -> None:
    """Stop them, and wait until they have ended, for the grace period at most."""
    engine = current_engine()
    await coord.end(engine, engine.now() + GRACE_SECS, cancel_tasks=False)
