"""Coordinator: TensorFlow's face of one stop for threads and side tasks; the first error wins."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from .._check import always_called
from .._engine.base import STOPPED, Engine, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, LostPeer, Stop, StopReason, reason_for
from .._errors import leaves_of, out_of_range_types
from .._log import fields
from .backoff import Restart
from .tasks import OnFailure, SideTask, TaskGroup

logger = logging.getLogger("asynchooks")

T = TypeVar("T")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]
OnStop = Callable[[BaseException | None, StopReason, bool], None]
"""Called for each request to stop: with its error, its reason, and whether it is for all workers.

In any thread.
"""


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

    def __init__(
        self, clean_stop_exception_types: Iterable[type[BaseException]] | None = None
    ) -> None:
        given = clean_stop_exception_types
        self._clean_types = None if given is None else tuple(given)
        self._threads: tuple[threading.Thread, ...] = ()
        self._joined = False
        self.on_stop: OnStop = lambda *_: None
        """Tells the session that it belongs to of each request to stop."""
        self._has_ended = False
        self.stop = Stop()
        """Where it belongs to a session, that is joined to the session's."""
        self.tasks = TaskGroup(self.stop, lambda error, why: self.request_stop(error, reason=why))
        self.lost_step = LostPeer()
        """Where a guard says that the step which a session runs in a thread will never return."""

    @property
    def joined(self) -> bool:
        """Whether `join` has returned or raised."""
        return self._joined

    @property
    def error(self) -> BaseException | None:
        """The first error reported, unless it was of a clean type."""
        return self.stop.error

    @property
    def stop_reason(self) -> StopReason | None:
        """The first request to stop; None before that."""
        return self.stop.reason

    @always_called
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
        if error is not None:
            if self._joined:
                raise error
            if self.error is None:
                text = "Error reported to Coordinator: %s, %s"
                logger.info(text, type(error).__name__, error, extra=fields(reason=why))
        self.stop.set(why, error)
        if all_workers or not self._has_ended:  # a session has moved on from one that has
            self.on_stop(error, why, all_workers)

    def clear_stop(self) -> None:
        """Forget the stop and its error, so that the coordinator can be used again."""
        self._joined = False
        self.stop.clear()
        of_session = self.stop.parent
        if of_session is not None and not of_session.is_for_good:
            of_session.clear()

    def raise_requested_exception(self) -> None:
        """Raise the error that was reported, if there is one."""
        if self.error is not None:
            raise self.error

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
        slot: Any = _ThreadSlot()
        with EndsAtStop(slot, self.stop):
            slot.wait(timeout)
        return self.should_stop()

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
        return await self.tasks.or_stop(fn, *args)

    def register_thread(self, thread: threading.Thread) -> None:
        """Have `join` wait for this thread, too."""
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
        self._threads += tuple(threads or ())
        slot: Any = _ThreadSlot()
        ended, waited = _ThreadSlot(), self._running_threads()
        _wake_when_ended(waited, slot, ended)
        with EndsAtStop(slot, self.stop):
            slot.wait()
        ended.wait(max(0.0, stop_grace_period_secs))
        stragglers = self._finish_join(waited)
        self.raise_requested_exception()
        if stragglers and not ignore_live_threads:
            raise RuntimeError(
                f"Coordinator stopped with threads still running: {stragglers} "
                f"({stop_grace_period_secs} s after the stop; let them look at should_stop())"
            )

    async def end(
        self, engine: Engine, until: float, *, cancel_tasks: bool, lost_peer: LostPeer | None = None
    ) -> None:
        """Stop, then wait for threads and side tasks on the engine's clock, until then at most.

        Side tasks that live on are cancelled then; at once with `cancel_tasks`, or if they were
        started so. Threads are waited for until `lost_peer` is set at most: they block on what
        will never answer. Cancellation leaves at once; call it again, shielded, to finish.
        """
        self._has_ended = True
        self.stop.leave()
        self.stop.set(StopReason("the session", "it ends, or replaces what was lost"))
        await self.tasks.end(engine, until, cancel=cancel_tasks)
        waited = self._running_threads()
        if engine.is_virtual:
            for thread in waited:
                thread.join(max(0.0, until - engine.now()))
        elif waited:
            slot = Slot(engine, f"the threads {', '.join(thread.name for thread in waited)}")
            _wake_when_ended(waited, slot)
            if lost_peer is not None:
                lost_peer.add(slot)
            await engine.park(slot, until)
        await self.tasks.end(engine, until, cancel=cancel_tasks)  # those started meanwhile
        self._finish_join(waited)

    def _running_threads(self) -> list[threading.Thread]:
        return [thread for thread in dict.fromkeys(self._threads) if thread.is_alive()]

    def _finish_join(self, waited: Iterable[threading.Thread]) -> str:
        """Raise errors at their reporter from now on; returns the names of threads that live on."""
        self._joined, self._threads = True, ()
        stragglers = " ".join(thread.name for thread in waited if thread.is_alive())
        if stragglers:
            logger.info("Coordinator stopped with threads still running: %s", stragglers)
        return stragglers

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
        self.tasks.start(fn, args, on_failure, name, cancel_at_end)


class _ThreadSlot(threading.Event):
    """Where a thread waits, in place of a task's slot."""

    def wake(self, value: object = None) -> None:
        self.set()


def _wake_when_ended(threads: list[threading.Thread], *slots: Slot | _ThreadSlot) -> None:
    """Wake the slots when all threads have ended, without polling."""

    def watch() -> None:
        for thread in threads:
            thread.join()
        for slot in slots:
            slot.wake()

    threading.Thread(target=watch, name="asynchooks-join", daemon=True).start()
