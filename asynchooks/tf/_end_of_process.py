"""Daemon threads that call TensorFlow, for which the end of the process waits a while.

A thread that comes back from TensorFlow while the interpreter is being taken down aborts the
process ("terminate called ... exception not rethrown"), and its exit code is that of a failure.
One that never comes back does no harm. Nothing here ends a thread.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import ClassVar, Protocol
from weakref import WeakSet

from .._engine import now
from .._work_thread import WorkThread

_PATIENCE_SECS = 5.0
"""How long the end of the process waits at most: a server may have fallen silent."""


class Closable(Protocol):
    """What has threads that end after its `close`, which returns at once."""

    def close(self) -> None: ...


class TensorFlowThread(threading.Thread):
    """A daemon thread, started at once, that the end of the process waits for, for a while."""

    # The end of a process is one thing, whoever has started threads in it.
    _running: ClassVar[WeakSet[TensorFlowThread]] = WeakSet()
    _owners: ClassVar[WeakSet[Closable]] = WeakSet()
    _guard = threading.Lock()

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        with self._guard:
            self._running.add(self)
        self.start()

    @classmethod
    def close_at_exit(cls, owner: Closable) -> None:
        """Close this at the end of the process, if it is there still."""
        with cls._guard:
            cls._owners.add(owner)

    @classmethod
    def end_all(cls) -> None:
        """At the end of the process: close what is open, and wait for the threads."""
        until = now() + _PATIENCE_SECS
        with cls._guard:
            owners = list(cls._owners)
        for owner in owners:
            owner.close()
        while now() < until:
            with cls._guard:  # anew: the end of one may start another
                threads = [*cls._running, *WorkThread.left_alone]
            running = [each for each in threads if each.is_alive()]
            if not running:
                return
            running[0].join(max(0.0, until - now()))


atexit.register(TensorFlowThread.end_all)
