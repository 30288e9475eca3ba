"""BackgroundThread: a daemon thread that goes on beside tasks, until it is asked to end.

Unlike `WorkThread`, which calls one function at a time for a task that waits for it, it works by
itself, for what has to be written while training goes on. It knows nothing of what it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from .base import TIMED_OUT, Engine, Slot

_JOIN_SECS = 0.1
"""A thread that has said that it ends is gone within microseconds, unless others hold Python."""


class BackgroundThread:
    """Its owner starts it, and asks it to end; daemon, so that it cannot hold the process's exit.

    Args:
        name: of the thread.
        serve: called in it; it calls `pause` between two pieces of work, and returns when that is
            true.
    """

    def __init__(self, name: str, serve: Callable[[], None]) -> None:
        self.is_ending = False
        """It was asked to end."""
        self._serve = serve
        # a garbage collector's call may ring while the thread takes from it
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the next two
        self._has_ended = False
        self._waiters: list[Slot] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pause(self, secs: float | None = None) -> bool:
        """In the thread: wait for a ring, or for so many seconds; whether it is to end."""
        if not self.is_ending:
            with suppress(Empty):
                self._bell.get(timeout=secs)
                while True:  # several rings are one
                    self._bell.get_nowait()
        return self.is_ending

    def ring(self) -> None:
        """End the pause, or the next one; from anywhere, without a lock."""
        self._bell.put(None)

    def end(self) -> None:
        """Ask it to end; waits for nothing and takes no lock."""
        self.is_ending = True
        self.ring()

    def join(self, secs: float | None = None) -> bool:
        """Hold up this thread until it has ended, or for so many seconds; whether it has."""
        if self._thread.ident is None:
            return True  # it was never started
        self._thread.join(secs)
        return not self._thread.is_alive()

    async def wait_for_end(self, engine: Engine, until: float) -> bool:
        """Whether it has ended by then, on the engine's clock. Cancellation safe."""
        slot = Slot(engine, f"the end of the thread {self._thread.name}")
        with self._lock:
            if not self._has_ended:
                self._waiters.append(slot)
            else:
                slot.wake()
        if await engine.park(slot, until) is TIMED_OUT:
            return False
        self._thread.join(_JOIN_SECS)
        return True

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            with self._lock:
                self._has_ended = True
                for slot in self._waiters:
                    slot.wake()
