"""The asyncio event loop that holds connections to Dask, and calls to it from any other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from typing import Any, Self

from .._engine.base import Slot
from .._engine.current import current_engine
from .._engine.threads import WorkThread


class DaskLoop:
    """The event loop of a Dask client or worker, of the caller, or of a thread that `end` ends."""

    _thread: WorkThread | None = None
    _ended: asyncio.Event  # of that thread: what ends it

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @classmethod
    def of_its_own(cls) -> Self:
        """The running one, if that is asyncio's; else one in a new daemon thread."""
        running = running_loop()
        if running is not None:
            return cls(running)
        own = cls(asyncio.new_event_loop())
        ended = own._ended = asyncio.Event()

        def run() -> None:  # at its end it cancels what is left: Dask's own tasks
            with asyncio.Runner(loop_factory=lambda: own._loop) as runner:
                runner.run(ended.wait())

        own._thread = WorkThread(current_engine(), "asynchooks-dask")
        own._thread.begin(lambda: Context().run(run))
        return own

    @property
    def is_here(self) -> bool:
        return self._loop is running_loop()

    async def run(self, fn: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        """Await `fn(*args, **options)` there; a cancellation here cancels it.

        Raises:
            ConnectionError: the event loop has ended.
        """
        if self.is_here:
            return await fn(*args, **options)

        async def work() -> Any:  # on the loop of a synchronous client, too, it is asynchronous
            return await fn(*args, **options)

        slot = Slot(current_engine(), "Dask's event loop")
        gone = ConnectionError("the event loop of the Dask client has ended")
        pending = work()
        try:  # in an empty context: that of the caller names another event loop
            future = Context().run(asyncio.run_coroutine_threadsafe, pending, self._loop)
        except RuntimeError:
            pending.close()
            raise gone from None
        future.add_done_callback(slot.wake)
        try:
            await slot.engine.park(slot)
        except BaseException:
            future.cancel()
            raise
        if future.cancelled():
            raise gone
        return future.result()

    def soon(self, fn: Callable[[], object]) -> None:
        """Call it there, from any thread, unless the event loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(fn)

    def end(self) -> None:
        """End the thread, if there is one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self.soon(self._ended.set)
            thread.close()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The running event loop, if it is asyncio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
