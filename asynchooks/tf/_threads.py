"""Daemon threads that call TensorFlow; the process waits for them, for some seconds, when it exits.

A thread that comes back from TensorFlow while the interpreter is being taken down aborts the
process ("terminate called ... exception not rethrown"), and its exit code is that of a failure.
One that never comes back does no harm. Nothing here ends a thread.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, ClassVar
from weakref import WeakSet

from .._engine.current import now
from .._engine.threads import WorkThread, call

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


GivenUp = CancelledError
"""A call was abandoned."""


class PatientThread:
    """A daemon thread that makes blocking calls for another thread, one at a time.

    The other thread is notified when a call takes too long, and continues to wait: a stopped server
    may be continued. A call that has not returned is never followed by another one.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._result: Future[Any] = Future()  # of the last call
        self._is_given_up = False
        TensorFlowThread(self._serve, name)

    def call(
        self, fn: Callable[[], Any], patience_secs: float, impatient: Callable[[], None]
    ) -> Any:
        """Return what `fn()` returns; call `impatient()` once if it takes longer than that.

        Raises GivenUp if `give_up` was called.
        """
        result = self._result = Future()
        if self._is_given_up:  # read after the future is set; `give_up` goes in the other order
            result.cancel()
        self._jobs.put((fn, result))
        try:
            result.exception(patience_secs)
        except TimeoutError:
            impatient()
        return result.result()

    def give_up(self) -> None:
        """Abandon the call that is under way, and make no more; from any thread."""
        self._is_given_up = True
        self._result.cancel()
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            outcome, result = call(job[0]), job[1]
            with suppress(InvalidStateError):  # it was given up
                if outcome.error is None:
                    result.set_result(outcome.value)
                else:
                    result.set_exception(outcome.error)
            del job, outcome, result
