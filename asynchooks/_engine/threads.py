"""Threads for blocking calls, and how cancellation passes a thread by.

A thread belongs to one owner: more would never be used, and fewer for all sessions together would
deadlock steps that wait for each other. Nothing here knows what is called.
"""

from __future__ import annotations

import inspect
import logging
import math
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, ClassVar
from weakref import WeakSet

from .base import STOPPED, TIMED_OUT, Engine, Slot
from .current import engine_in_use
from .stop import Loss

logger = logging.getLogger("asynchooks")


class Outcome:
    """What a call came to: a value or an error. StopIteration passes a future no other way."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


WhenLate = Callable[[Outcome], None]


def drop(outcome: Outcome) -> None:
    """What becomes of an outcome that no task waits for."""
    close_unrun(outcome.value)


def close_unrun(awaitable: object) -> None:
    """Close a coroutine that will not be run, with the one that it was given to await.

    Else Python warns, when it is freed, that it was never awaited.
    """
    while inspect.iscoroutine(awaitable):
        pending = inspect.getcoroutinelocals(awaitable).get("pending")
        awaitable.close()
        awaitable = pending


def call(fn: Callable[[], Any]) -> Outcome:
    """Call the function here and keep whatever it comes to."""
    try:
        return Outcome(fn())
    except BaseException as error:
        return Outcome(error=error)


class WorkThread:
    """A daemon thread that calls one function at a time for one owner, who closes it.

    Daemon, so that a step that never ends cannot hold the process's exit.
    """

    __slots__ = ("_engine", "_is_busy", "_jobs", "_name", "_thread", "_what")

    # Those that were abandoned, for the end of the process: one thing, whoever has started them.
    left_alone: ClassVar[WeakSet[threading.Thread]] = WeakSet()

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._what = f"a call in the thread {name}"
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    async def run(
        self,
        fn: Callable[[], Any],
        grace_secs: float,
        when_late: WhenLate = drop,
        until: float = math.inf,
        loss: Loss | None = None,
    ) -> Any:
        """Call `fn` in the thread and return its value, or raise its error.

        A cancellation waits for the call for the grace period, then the thread is abandoned and
        the cancellation leaves; a second one leaves at once.

        Args:
            fn: what to call; runs in a copy of the caller's context.
            grace_secs: seconds, >= 0.
            when_late: gets the outcome that nobody waits for: of a call that was cancelled, or
                in the thread of one that was abandoned.
            until: when to abandon it in any case, on the engine's clock; then this returns None.
            loss: what says that the call will never return; it is abandoned, the error raised.
        """
        engine = self._engine
        slot = Slot(engine, self._what)
        if self._thread is None:
            args = (self._jobs, engine)
            self._thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
            self._thread.start()
        job = _Job(fn, when_late, slot)
        self._jobs.put(job)
        self._is_busy = True
        if loss is not None:
            loss.add(slot)
        try:
            outcome = await engine.park(slot, until)
        except BaseException:
            # opened only now: before the cancellation came, a scope would cost each step
            try:
                with engine.shielded(max(0.0, min(grace_secs, until - engine.now()))):
                    await engine.park(slot)
            finally:
                if not slot.is_woken or slot.value is STOPPED:
                    self._abandon(job)
                else:
                    if slot.value.error is not None:
                        logger.warning("A cancelled call failed: %r", slot.value.error)
                    when_late(slot.value)
            raise
        finally:
            self._is_busy = False
            if loss is not None:
                loss.discard(slot)
        if outcome is TIMED_OUT:
            return self._abandon(job)
        if outcome is STOPPED:
            assert loss is not None
            self._abandon(job)
            raise loss.error()
        return outcome.unwrap()

    def _abandon(self, job: _Job) -> None:
        thread = self._dismiss()
        if thread is not None:
            self.left_alone.add(thread)
        job.abandon()
        logger.warning("A call in the thread %s did not end in time and is left alone", self._name)

    def close(self) -> None:
        """End the thread, if it is idle now; the next `run` begins a new one.

        A call that another task has under way goes on, and is the thread's last.
        """
        is_busy, thread = self._is_busy, self._dismiss()
        if thread is not None and not is_busy:
            # it has nothing left to do; a thread that the end of the process meets within a
            # library's code makes the process abort
            thread.join()

    def drop(self) -> None:
        """Let the thread end after its present call; from any thread, also the garbage collector's.

        It is not joined: that might be this very thread.
        """
        self._dismiss()

    def _dismiss(self) -> threading.Thread | None:
        """Let the thread end after its present call."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            self._jobs = queue.SimpleQueue()
        return thread


class _Job:
    """One call; its outcome goes to whoever waits, or to `when_late` once nobody does."""

    __slots__ = ("_context", "_fn", "_late", "_outcome", "is_abandoned", "slot")

    def __init__(self, fn: Callable[[], Any], when_late: WhenLate, slot: Slot) -> None:
        self._fn = fn
        self._context = copy_context()
        self._late = [when_late]  # whoever takes it out calls it: a lock would cost each call
        self._outcome: Outcome | None = None
        self.slot = slot
        self.is_abandoned = False

    def run(self, engine: Engine) -> Outcome:
        outcome = self._outcome = self._context.run(_call_in, engine, self._fn)
        if self.is_abandoned:  # looked at after the outcome is there, which `abandon` looks for
            self._tell(outcome)
        return outcome

    def abandon(self) -> None:
        self.is_abandoned = True
        if self._outcome is not None:
            self._tell(self._outcome)

    def _tell(self, outcome: Outcome) -> None:
        when_late: WhenLate = drop
        with suppress(IndexError):  # told already
            when_late = self._late.pop()
        when_late(outcome)


def _serve(jobs: queue.SimpleQueue[_Job | None], engine: Engine) -> None:
    while (job := jobs.get()) is not None:
        slot, outcome = job.slot, job.run(engine)
        del job  # whoever is woken may end the process: free the step's arrays first
        engine.wake(slot, outcome)
        del outcome, slot


def _call_in(engine: Engine, fn: Callable[[], Any]) -> Outcome:
    # the copied context says which event loop the task runs on; this thread runs none, or its own
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        sniffio.current_async_library_cvar.set(None)
    engine_in_use.set(engine)  # the context is this call's own
    return call(fn)


async def run_blocking(
    engine: Engine,
    fn: Callable[[], Any],
    grace_secs: float,
    name: str,
    when_late: WhenLate = drop,
    until: float = math.inf,
    loss: Loss | None = None,
) -> Any:
    """Call a blocking function once, off the event loop; inline where time is simulated."""
    if engine.is_virtual:
        return fn()
    thread = WorkThread(engine, name)
    try:
        return await thread.run(fn, grace_secs, when_late, until, loss)
    finally:
        thread.close()
