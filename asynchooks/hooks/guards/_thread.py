"""A daemon thread that watches an event loop from outside, for hooks that guard it."""

from __future__ import annotations

import threading
from collections.abc import Callable

_JOIN_SECS = 1.0
"""How long the end of a session waits for a line that the thread is just logging."""


class GuardThread:
    """Calls `look` after `first_secs`, and again after the seconds that it returns; None: never.

    A daemon, so that a guard that was not closed cannot delay the exit of the process.
    """

    __slots__ = ("_first_secs", "_is_closed", "_look", "_thread")

    def __init__(self, look: Callable[[], float | None], first_secs: float, name: str) -> None:
        self._look = look
        self._first_secs = first_secs
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        secs: float | None = self._first_secs
        while secs is not None and not self._is_closed.wait(min(secs, threading.TIMEOUT_MAX)):
            secs = self._look()

    def close(self) -> None:
        """End the thread, and wait for it; may be called again, from any thread."""
        self._is_closed.set()
        # the garbage collector closes a dropped session in any thread, perhaps in this one
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECS)
