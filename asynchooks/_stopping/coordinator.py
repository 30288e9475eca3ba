"""Coordinator: one stop for threads and side tasks; the first error wins.

It decides nothing about sessions: what a session does with a stop stands in `_session.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from .._engine.base import STOPPED, Engine, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, LostPeer, Stop, StopReason, reason_for
from .._errors import add_note, leaves_of, out_of_range_types
from .._log import fields
from .backoff import Restart
from .tasks import OnFailure, SideTask, SideTasks, or_stop

logger = logging.getLogger("asynchooks")

T = TypeVar("T")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class CoordinatorOwner:
    """The session that a coordinator belongs to; this one does nothing of its own."""

    __slots__ = ()

    def stop_changed(self, is_set: bool) -> None:
        """A stop was requested, or cleared; in any thread."""

    def stop_all(self, reason: StopReason) -> None:
        """All workers that share the model are to stop; in any thread."""

    def in_session_context(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]:
        """The coroutine of a side task, in what surrounds the session; its name is for errors."""
        return coroutine


_NO_OWNER = CoordinatorOwner()


class Coordinator:
    """Stops a set of threads and side tasks together, and holds the first error among them.

    A session makes one for each raw session and gives it to `after_create_session`; you may make
    one for your own threads. Every method but `start_soon`, `or_stop`, `wait_stopped` and `end`
    works from any thread and without an event loop.

    Args:
        clean_stop_exception_types: errors that count as a stop without an error when reported;
            None means TensorFlow's OutOfRangeError. A session's own coordinator has none.

    Source: TensorFlow's `tf.compat.v1.train.Coordinator`; side tasks are ours.

    Example:
        coord = Coordinator()
        with coord.stop_on_exception():  # in each thread
            while not coord.should_stop():
                work()
        coord.join(threads)              # raises the first error
    """

    __slots__ = (
        "_changed", "_clean_types", "_error", "_is_detached", "_joined", "_lock", "_lost_step",
        "_owner", "_reason", "_tasks", "_threads", "stop",
    )  # fmt: skip

    def __init__(
        self, clean_stop_exception_types: Iterable[type[BaseException]] | None = None
    ) -> None:
        given = clean_stop_exception_types
        self._clean_types = None if given is None else tuple(given)
        self._lock = threading.RLock()  # guards all that follows
        self._changed: threading.Condition | None = None  # what threads wait for, once some do
        self._error: BaseException | None = None
        self._reason: StopReason | None = None
        self._threads: tuple[threading.Thread, ...] = ()  # each once
        self._joined = False
        # what waits beside this coordinator ends with it; side tasks are born with it
        self.stop = Stop()
        self._lost_step: LostPeer | None = None  # once it is asked for
        self._tasks: SideTasks | None = None  # once there are any
        self._owner = _NO_OWNER  # one object: a thousand sessions have a coordinator each
        self._is_detached = False

    def attach(self, owner: CoordinatorOwner) -> None:
        """Belong to a session, which is notified of each stop, and runs the side tasks."""
        self._owner = owner

    def detach(self) -> None:
        """The session has moved on: of this coordinator's stops only those of all concern it."""
        self._is_detached = True

    @property
    def lost_step(self) -> LostPeer:
        """Where a guard says that the step which a session runs in a thread will never return."""
        with self._lock:
            self._lost_step = self._lost_step or LostPeer()
            return self._lost_step

    @property
    def joined(self) -> bool:
        """Whether `join` has returned or raised."""
        return self._joined

    @property
    def error(self) -> BaseException | None:
        """The first error reported, unless it was of a clean type."""
        return self._error

    @property
    def stop_reason(self) -> StopReason | None:
        """The first request to stop; None before that."""
        return self._reason

    def names_of_tasks(self) -> tuple[str, ...]:
        """Of the side tasks that are running; from any thread."""
        return () if self._tasks is None else self._tasks.names()

    def should_stop(self) -> bool:
        """Whether a stop was requested."""
        return self.stop.is_set

    def request_stop(
        self,
        ex: BaseException | ExcInfo | None = None,
        *,
        reason: StopReason | str | None = None,
        all_workers: bool = False,
    ) -> None:
        """Ask threads and tasks to stop; the first error is kept, also after a stop without one.

        Args:
            ex: an exception, the tuple of `sys.exc_info()`, or None.
            reason: why, for `stop_reason`; the first one stands.
            all_workers: whether all workers stop that share the model of a session, as by
                `session.request_stop`; the error leaves this one only. Nothing more than a stop
                for a coordinator of your own.

        Raises:
            BaseException: `ex` itself, after `join`, when no other caller would see it.
            TypeError: `ex` or `reason` is something else.
        """
        error = ex[1] if isinstance(ex, tuple) and len(ex) == 3 else ex
        if error is not None and not isinstance(error, BaseException):
            raise TypeError(
                f"request_stop got {ex!r}; give an exception, sys.exc_info(), or nothing"
            )
        clean_types = out_of_range_types() if self._clean_types is None else self._clean_types
        if error is not None and all(isinstance(each, clean_types) for each in leaves_of(error)):
            error = None
        why = reason_for(error, reason, "the coordinator")
        with self._lock:
            if self._joined and error is not None:
                raise error
            if error is not None and self._error is None:
                logger.info(
                    "Error reported to Coordinator: %s, %s", type(error).__name__, error,
                    extra=fields(reason=why),
                )  # fmt: skip
            elif error is not None and error is not self._error:
                assert self._error is not None
                add_note(self._error, f"then, reported to the coordinator too: {error!r}")
            self.record(error, why)
        if not self._is_detached:
            self._owner.stop_changed(True)
        if all_workers:
            self._owner.stop_all(why)

    def record(self, error: BaseException | None, reason: StopReason | None) -> None:
        """Stop, without notifying the session; the first error and the first reason stand."""
        with self._lock:
            self._reason = self._reason or reason
            self._error = self._error or error
            self.stop.set()
            self._notify()

    def clear_stop(self) -> None:
        """Forget the stop and its error, so that the coordinator can be used again."""
        with self._lock:
            self._joined = False
            self._error = self._reason = None
            self.stop.clear()
        if not self._is_detached:
            self._owner.stop_changed(False)

    def raise_requested_exception(self) -> None:
        """Raise the error that was reported, if there is one."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Report what is raised in the block, and swallow it; for threads as for tasks.

        KeyboardInterrupt, SystemExit and cancellation pass through.
        """
        try:
            yield
        except Exception as error:
            self.request_stop(error)

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Block this thread until a stop, `timeout` seconds at most; returns whether it came.

        Unlike `wait_stopped`, this is for threads: it would block an event loop.
        """
        return self._wait_until(self.should_stop, timeout)

    async def wait_stopped(self, timeout: float | None = None) -> bool:
        """Suspend until a stop, `timeout` seconds at most; returns whether it came.

        Cancellation safe. Unlike `wait_for_stop`, this is for tasks.
        """
        engine = current_engine()
        slot = Slot(engine, "a stop")
        until = float("inf") if timeout is None else engine.now() + timeout
        with EndsAtStop(slot, self.stop):
            return await engine.park(slot, until) is STOPPED

    async def or_stop(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await `fn(*args)`, a wait of another library, but no longer than until a stop.

        For side tasks and hooks; `session.or_stop` is the same for the body of the block.

        Raises:
            StopTraining: a stop was requested; `fn` was cancelled.
            BaseException: what `fn` raised.
        """
        in_context = self._owner.in_session_context
        return await or_stop(current_engine(), self.stop, in_context, fn, *args)

    def register_thread(self, thread: threading.Thread) -> None:
        """Have `join` wait for this thread, too."""
        with self._lock:
            if thread not in self._threads:
                self._threads += (thread,)

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Block this thread until all threads have ended; after a stop, for the grace period.

        Args:
            threads: threads to wait for beside the registered ones.
            stop_grace_period_secs: seconds that they get after the stop, >= 0.
            ignore_live_threads: whether threads that live on are only logged.

        Raises:
            BaseException: the error that was reported.
            RuntimeError: threads live on (names them).
        """
        with self._lock:
            waited = [t for t in {*self._threads, *(threads or ())} if t.is_alive()]
        ended = when_ended(waited, self._notify)
        self._wait_until(lambda: self.should_stop() or ended.is_set())
        ended.wait(max(0.0, stop_grace_period_secs))
        self.finish_join(waited)
        self.raise_requested_exception()
        stragglers = [t.name for t in waited if t.is_alive()]
        if stragglers and not ignore_live_threads:
            raise RuntimeError(
                f"Coordinator stopped with threads still running: {' '.join(stragglers)} "
                f"({stop_grace_period_secs} s after the stop; let them look at should_stop())"
            )

    async def end(
        self, engine: Engine, until: float, *, cancel_tasks: bool, lost_peer: LostPeer | None = None
    ) -> None:
        """Stop, then wait for threads and side tasks on the engine's clock, until then at most.

        Side tasks that live on are cancelled then; at once with `cancel_tasks`, or if they were
        started so. Threads are waited
        for until `lost_peer` is set at most: they block on what will never answer. Cancellation
        leaves at once; call it again, shielded, to finish.
        """
        self.request_stop(reason=StopReason("the session", "it ends, or replaces what was lost"))
        if self._tasks is not None:
            await self._tasks.end(engine, until, cancel=cancel_tasks)
        with self._lock:
            waited = [t for t in self._threads if t.is_alive()]
        if waited and engine.is_virtual:
            when_ended(waited, lambda: None).wait(max(0.0, until - engine.now()))
        elif waited:
            slot = Slot(engine, f"the threads {', '.join(t.name for t in waited)}")
            when_ended(waited, slot.wake)
            if lost_peer is not None:
                lost_peer.add(slot)
            await engine.park(slot, until)
        if self._tasks is not None:  # those that were started meanwhile
            await self._tasks.end(engine, until, cancel=cancel_tasks)
        self.finish_join(waited)

    def finish_join(self, waited: Iterable[threading.Thread]) -> None:
        """Take note that the threads were waited for; errors are raised at the reporter now."""
        with self._lock:
            self._joined = True
            self._threads = ()
        stragglers = [t.name for t in waited if t.is_alive()]
        if stragglers:
            logger.info("Coordinator stopped with threads still running: %s", " ".join(stragglers))

    def start_soon(
        self,
        fn: SideTask,
        *args: Any,
        on_failure: OnFailure | Restart = OnFailure.STOP,
        name: str | None = None,
        cancel_at_end: bool = False,
    ) -> None:
        """Start `fn(*args)` as a side task: it never outlives the session, nor a raw session.

        An error in it is a stop, unless `on_failure` says otherwise, and leaves the session at its
        end as itself. At the end of the session every wait of asynchooks in it raises
        StopTraining; it gets the grace period, and is cancelled then.

        Args:
            on_failure: `OnFailure.STOP`, `OnFailure.LOG` or a `Restart`.
            name: what to call it in logs and reasons; by default what `fn` is called.
            cancel_at_end: whether it is cancelled as soon as the session, or the raw session,
                ends, after `end` of all hooks. What it shields then has the grace period. A stop
                alone does not cancel it.

        Raises:
            RuntimeError: the coordinator was joined: the session is over.
            TypeError: `fn` cannot be called, `on_failure` is no policy, or `cancel_at_end` no bool.
        """
        if self._joined:
            raise RuntimeError(
                f"start_soon({fn!r}) after the coordinator was joined; "
                "start side tasks while the session is open"
            )
        if self._tasks is None:
            in_context = self._owner.in_session_context
            fail = lambda error, reason: self.request_stop(error, reason=reason)  # noqa: E731
            self._tasks = SideTasks(self.stop, in_context, fail, lambda: self._joined)
        self._tasks.start(fn, args, on_failure, name, cancel_at_end)

    def _notify(self) -> None:
        with self._lock:
            if self._changed is not None:
                self._changed.notify_all()

    def _wait_until(self, is_so: Callable[[], bool], timeout: float | None = None) -> bool:
        with self._lock:
            self._changed = self._changed or threading.Condition(self._lock)
            return self._changed.wait_for(is_so, timeout)


def when_ended(threads: list[threading.Thread], callback: Callable[[], object]) -> threading.Event:
    """An event that is set, and a callback called, when the threads have ended: no polling."""
    ended = threading.Event()

    def watch() -> None:
        for thread in threads:
            thread.join()
        ended.set()
        callback()

    if threads:
        threading.Thread(target=watch, name="asynchooks-join", daemon=True).start()
    else:
        ended.set()
    return ended
