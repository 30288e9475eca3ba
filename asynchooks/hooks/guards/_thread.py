"""A daemon thread that watches from outside of the event loop, for hooks that guard it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_JOIN_SECS = 1.0
"""How long the end of a session waits for a line that the thread is just logging."""


class GuardThread:
    """Calls `look` after `first_secs`, and again after the seconds that it returns; None: never.

    A daemon, so that a guard that was not closed cannot delay the exit of the process.
    """

    __slots__ = ("_first_secs", "_look", "_messages", "_thread")

    def __init__(self, look: Callable[[], float | None], first_secs: float, name: str) -> None:
        self._look = look
        self._first_secs = first_secs
        # unlike an Event, it has no lock that a signal handler could find taken
        self._messages: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        secs: float | None = self._first_secs
        while secs is not None:
            try:
                if not self._messages.get(timeout=min(secs, threading.TIMEOUT_MAX)):
                    return
            except queue.Empty:
                pass
            secs = self._look()

    def look_now(self) -> None:
        """Have `look` called at once; also in a signal handler."""
        self._messages.put(True)

    def let_go(self) -> None:
        """End the thread, and wait for nothing."""
        self._messages.put(False)

    def close(self) -> None:
        """End the thread, and wait for it; may be called again, from any thread."""
        self.let_go()
        # the garbage collector closes a dropped session in any thread, perhaps in this one
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECS)
