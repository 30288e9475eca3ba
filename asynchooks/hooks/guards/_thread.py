"""A daemon thread that watches from outside of the event loop, for hooks that guard it.

It knows nothing of what is watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_JOIN_SECS = 1.0
"""What the end of a session gives to what the thread is just logging."""


class GuardThread:
    """Calls a function at moments that it names itself. The hook that makes it closes it.

    A daemon, so that a guard that nobody closed cannot hold the process's exit.

    Args:
        look: returns in how many seconds it is to be called again, >= 0, or None: never.
        first_secs: seconds until the first call, >= 0.
        name: of the thread.
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
        """End the thread, and wait until it has; may be called again, from any thread."""
        self._is_closed.set()
        # the garbage collector closes a forgotten session in whichever thread it runs
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECS)
