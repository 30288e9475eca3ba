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


class TensorFlowThreads:
    """The daemon threads of the process that the exit waits for, with those that were abandoned."""

    # Of the whole process, as it exits once.
    _closables: ClassVar[WeakSet[Any]] = WeakSet()

    @classmethod
    def start(cls, target: Callable[[], object], name: str, owner: Any = None) -> None:
        """Start one; the exit calls `close` of its owner, which must not block, if it is there."""
        if owner is not None:
            cls._closables.add(owner)
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        WorkThread.left_alone.add(thread)

    @classmethod
    def end_all(cls) -> None:
        """When the process exits: close what is open, and wait for the threads."""
        until = now() + _PATIENCE_SECS
        for each in list(cls._closables):
            each.close()
        while (left := until - now()) > 0:  # again: the end of one may start another
            running = [each for each in list(WorkThread.left_alone) if each.is_alive()]
            if not running:
                return
            running[0].join(left)


atexit.register(TensorFlowThreads.end_all)
