"""Blocking calls in a thread that may be left behind. What is called is not known here."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from .._work_thread import Outcome, call
from ._end_of_process import TensorFlowThread


class PatientThread:
    """A daemon thread that calls one function at a time for another thread, its owner.

    The owner learns when a call takes too long and may go on to wait: a server that is stopped
    may be continued. It never starts a second call beside one that has not returned.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._outcome: Outcome | None = None
        self._is_given_up = False
        TensorFlowThread(self._serve, name)

    def call(
        self, fn: Callable[[], Any], patience_secs: float, impatient: Callable[[], None]
    ) -> Any:
        """Return what `fn()` returns, or raise its error.

        Args:
            patience_secs: seconds, > 0, after which `impatient` is called, once.

        Raises:
            GivenUp: the owner is to leave the call behind.
        """
        with self._changed:
            self._outcome = None
        self._jobs.put(fn)
        with self._changed:
            is_over = self._changed.wait_for(self._is_over, patience_secs)
        if not is_over:
            impatient()
        with self._changed:
            self._changed.wait_for(self._is_over)
            if self._outcome is None:
                raise GivenUp
            return self._outcome.unwrap()

    def give_up(self) -> None:
        """Leave the call that is under way behind, and make no more; from any thread."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()
        self._jobs.put(None)

    def _is_over(self) -> bool:
        return self._outcome is not None or self._is_given_up

    def _serve(self) -> None:
        while (fn := self._jobs.get()) is not None:
            outcome = call(fn)
            with self._changed:
                self._outcome = outcome
                self._changed.notify_all()
            del fn, outcome


class GivenUp(Exception):  # noqa: N818 - like StopIteration, it is no error
    """A call was left behind."""
