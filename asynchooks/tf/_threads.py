"""Daemon threads that call TensorFlow; the process waits for them, for some seconds, when it exits.

A thread that comes back from TensorFlow while the interpreter is being taken down aborts the
process ("terminate called ... exception not rethrown"), and its exit code is that of a failure.
One that never comes back does no harm. Nothing here ends a thread.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

from .._engine.current import now
from .._engine.threads import WorkThread

_PATIENCE_SECS = 5.0
"""How long the exit of the process waits at most: a server may not answer."""


class TensorFlowThread(threading.Thread):
    """A daemon thread, started at once; the exit of the process waits for it for some seconds."""

    # Of the whole process, as it exits once.
    _running: ClassVar[WeakSet[TensorFlowThread]] = WeakSet()
    _closables: ClassVar[WeakSet[Any]] = WeakSet()
    _guard = threading.Lock()

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        with self._guard:
            self._running.add(self)
        self.start()

    @classmethod
    def close_at_exit(cls, closable: Any) -> None:
        """Call its `close`, which must not block, when the process exits, if it still exists."""
        with cls._guard:
            cls._closables.add(closable)

    @classmethod
    def end_all(cls) -> None:
        """When the process exits: close what is open, and wait for the threads."""
        until = now() + _PATIENCE_SECS
        with cls._guard:
            closables = list(cls._closables)
        for each in closables:
            each.close()
        while now() < until:
            with cls._guard:  # again: the end of one may start another
                threads = [*cls._running, *WorkThread.left_alone]
            running = [each for each in threads if each.is_alive()]
            if not running:
                return
            running[0].join(max(0.0, until - now()))


atexit.register(TensorFlowThread.end_all)
