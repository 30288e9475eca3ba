"""The asyncio event loop that holds connections to Dask, and calls to it from any other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any, Self

from .._engine.base import Slot
from .._engine.current import current_engine
from .._engine.threads import Outcome

_JOIN_SECS = 2.0


class DaskLoop:
    """The event loop of a Dask client or worker, of the caller, or of a thread that `end` ends."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, thread: threading.Thread | None = None
    ) -> None:
        self._loop = loop
        self._thread = thread
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds weak references only

    @classmethod
    def of_its_own(cls) -> Self:
        """The running one, if that is asyncio's; else one in a new daemon thread."""
        running = running_loop()
        if running is not None:
            return cls(running)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(loop,), name="asynchooks-dask", daemon=True)
        thread.start()
        return cls(loop, thread)

    @property
    def is_here(self) -> bool:
        return self._loop is running_loop()

    @property
    def is_running(self) -> bool:
        return self._loop.is_running()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await it there; a cancellation here cancels it.

        Raises:
            ConnectionError: the event loop has ended.
        """
        if self.is_here:
            return await work
        slot = Slot(current_engine(), "Dask's event loop")
        ended = ConnectionError("the event loop of the Dask client has ended")

        async def carry() -> None:
            outcome = Outcome(error=ended)
            try:
                outcome = Outcome(await work)
            except Exception as error:
                outcome = Outcome(error=error)
            finally:
                slot.wake(outcome)

        def start() -> None:
            task = self._loop.create_task(carry())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            started.append(task)

        started: list[asyncio.Task[None]] = []
        try:  # in an empty context: that of the caller names another event loop
            self._loop.call_soon_threadsafe(start, context=Context())
        except RuntimeError:
            work.close()
            raise ended from None
        try:
            outcome: Outcome = await slot.engine.park(slot)
        except BaseException:
            self._soon(lambda: started[0].cancel())
            raise
        return outcome.unwrap()

    def end(self) -> None:
        """End the thread, if there is one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._soon(self._loop.stop)
            thread.join(_JOIN_SECS)

    def _soon(self, fn: Any) -> None:
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(fn)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    left = asyncio.all_tasks(loop)  # of a call that was just cancelled, and Dask's own
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=_JOIN_SECS / 2))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The running event loop, if it is asyncio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
