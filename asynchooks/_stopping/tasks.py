"""Side tasks: what runs beside a session, is watched, and never outlives it.

It decides nothing about when a session ends, nor what becomes of a failure that stops it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Any, TypeVar

from .._engine.base import STOPPED, Engine, EngineTask, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop, surrounding_stop
from .._engine.threads import Outcome
from .._errors import StopTraining, add_note, is_input_end, no_input_end
from .backoff import Restart

logger = logging.getLogger("asynchooks")

_CANCEL_SECS = 1.0
"""How long a cancelled side task is waited for: one that shields a long call is left behind."""

_PATIENCE_SECS = 1.0
"""How long the end of a session waits for side tasks without a word."""

SideTask = Callable[..., Awaitable[Any]]


class OnFailure(Enum):
    """What an error in a side task leads to; a `Restart` is the third choice.

    What is no Exception always stops: an exit, or the cancellation of something that it awaited.
    """

    STOP = auto()
    """The session stops; the error leaves it as itself."""
    LOG = auto()
    """The error is logged, and training goes on without the task."""


class _Task:
    """One side task; there from its start to its end."""

    __slots__ = ("engine_task", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine_task: EngineTask | None = None

    async def wait(self, until: float) -> bool:
        return self.engine_task is None or await self.engine_task.wait(until)

    def cancel(self) -> None:
        if self.engine_task is not None:
            self.engine_task.cancel()


class SideTasks:
    """The side tasks of one session, or of one coordinator, which makes it and ends it.

    Args:
        stop: what every wait of asynchooks in them ends at.
        drive: calls and awaits `fn(*args)` in what surrounds the session.
        fail: is told of an error that stops the session, and in which task it was.
    """

    __slots__ = ("_drive", "_fail", "_is_ending", "_running", "_stop")

    def __init__(
        self,
        stop: Stop,
        drive: Callable[[SideTask, tuple[Any, ...]], Awaitable[Any]],
        fail: Callable[[BaseException, str], None],
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stop = stop
        self._is_ending = is_ending
        self._drive = drive
        self._fail = fail
        self._running: dict[_Task, None] = {}  # in order of their starts

    def start(
        self,
        fn: SideTask,
        args: tuple[Any, ...],
        on_failure: OnFailure | Restart = OnFailure.STOP,
        name: str | None = None,
    ) -> None:
        """Start `fn(*args)`.

        Raises:
            TypeError: `fn` cannot be called, or `on_failure` is no policy.
        """
        if not callable(fn):
            raise TypeError(f"start_soon got {fn!r}; give an async function, then its arguments")
        if not isinstance(on_failure, (OnFailure, Restart)):
            raise TypeError(
                f"on_failure is {on_failure!r}; give OnFailure.STOP, OnFailure.LOG or a "
                "Restart(max_attempts=...)"
            )
        engine = current_engine()
        task = _Task(name or str(getattr(fn, "__qualname__", repr(fn))))
        self._running[task] = None
        task.engine_task = engine.start(self._supervise, engine, task, fn, args, on_failure)

    async def end(self, engine: Engine, until: float, *, cancel: bool) -> None:
        """Wait for all until then, on the engine's clock, and cancel them; at once if `cancel`.

        They were told to stop before. Cancellation leaves at once; call it again, shielded.
        """
        if self._running and not cancel:
            await self._say_who_is_late(engine, until)
        for task in list(self._running):
            if cancel or not await task.wait(until):
                task.cancel()
        last = engine.now() + _CANCEL_SECS
        for task in list(self._running):
            if not await task.wait(last):
                logger.error(
                    "The side task %s did not end when it was cancelled: left alone", task.name
                )
        self._running.clear()

    async def _say_who_is_late(self, engine: Engine, until: float) -> None:
        soon = min(until, engine.now() + _PATIENCE_SECS)
        late = [task.name for task in list(self._running) if not await task.wait(soon)]
        if late and soon < until:
            logger.warning(
                "Waiting up to %g s more for side tasks to stop before they are cancelled: %s. "
                "Their waits end at once through coord.or_stop(fn, *args)",
                until - soon, ", ".join(late),
            )  # fmt: skip

    async def _supervise(
        self,
        engine: Engine,
        task: _Task,
        fn: SideTask,
        args: tuple[Any, ...],
        on_failure: OnFailure | Restart,
    ) -> None:
        """Run a side task; its error goes to `fail`, never to whoever runs beside it."""
        surrounding_stop.set(self._stop)
        num_failures = 0
        try:
            while (error := await self._failure_of(engine, task, fn, args)) is not None:
                num_failures += 1
                if not isinstance(error, Exception) or on_failure is OnFailure.STOP:
                    logger.error("The side task %s failed, so training stops: %r", task.name, error)
                    self._fail(error, task.name)
                elif isinstance(on_failure, Restart):
                    if await self._may_restart(engine, task, error, num_failures, on_failure):
                        continue
                else:
                    logger.error(
                        "The side task %s failed; training goes on without it",
                        task.name, exc_info=error,
                    )  # fmt: skip
                return
        finally:
            self._running.pop(task, None)

    async def _failure_of(
        self, engine: Engine, task: _Task, fn: SideTask, args: tuple[Any, ...]
    ) -> BaseException | None:
        """Run it once; returns what it raised that was not only to stop when told to."""
        try:
            await self._drive(fn, args)
        except StopTraining as error:
            if not (self._stop.is_set or self._is_ending()):  # else it was told, and did
                logger.warning(
                    "The side task %s has ended by %r, and nobody had asked it to stop; training "
                    "goes on. To end it: session.request_stop()", task.name, error,
                )  # fmt: skip
            return None
        except BaseException as error:
            failure = engine.failure_in(error)
            if failure is None:
                raise
            if is_input_end(failure):  # it could pass for the clean end of a session around this
                failure = no_input_end(failure, f"the side task {task.name!r}")
        else:
            return None
        add_note(failure, f"in the side task {task.name!r}")
        return failure

    async def _may_restart(
        self, engine: Engine, task: _Task, error: Exception, num_failures: int, restart: Restart
    ) -> bool:
        if num_failures > restart.max_attempts:
            add_note(error, f"it was restarted {restart.max_attempts} times before")
            logger.error("The side task %s failed again, so training stops: %r", task.name, error)
            self._fail(error, task.name)
            return False
        pause = restart.pause_before(num_failures)
        logger.warning(
            "The side task %s failed (%s: %s); restarting it, attempt %d of %d, in %g s",
            task.name, type(error).__name__, error, num_failures, restart.max_attempts, pause,
        )  # fmt: skip
        slot = Slot(engine, f"the next attempt of the side task {task.name}")
        with EndsAtStop(slot, self._stop):
            return await engine.park(slot, engine.now() + pause) is not STOPPED


T = TypeVar("T")


class SlotCall:
    """A call in a task of its own, whose end wakes a slot; who starts it waits there.

    The outcome is None where its task was cancelled after the slot was woken.
    """

    __slots__ = ("_engine", "_slot", "outcome")

    def __init__(self, engine: Engine, slot: Slot) -> None:
        self._engine = engine
        self._slot = slot
        self.outcome: Outcome | None = None

    async def run(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """What the task runs."""
        try:
            self.outcome = Outcome(await fn(*args))
        except BaseException as error:
            failure = self._engine.failure_in(error)
            if failure is not None:
                self.outcome = Outcome(error=failure)
                return
            if not self._slot.is_woken:  # it is not ours: something else has cancelled this task
                self.outcome = Outcome(error=error)
            raise
        finally:
            self._slot.wake()


async def or_stop(
    engine: Engine,
    stop: Stop,
    drive: Callable[..., Awaitable[Any]],
    fn: Callable[..., Awaitable[T]],
    *args: Any,
) -> T:
    """Run `fn(*args)` in a task of its own until it ends, or cancel it at a stop.

    `drive(fn, args)` awaits it in what surrounds the session.

    Cancellation cancels it, too; in both cases it has ended when this returns.

    Raises:
        StopTraining: a stop came first, or had come before.
        BaseException: what `fn` raised.
    """
    if not callable(fn):
        raise TypeError(f"or_stop got {fn!r}; give an async function, then its arguments")
    if stop.is_set:
        raise StopTraining(f"a stop was requested before {name_of(fn)} was called")
    slot = Slot(engine, f"{name_of(fn)} or a stop")
    call = SlotCall(engine, slot)
    task = engine.start(call.run, drive, fn, args)
    try:
        with EndsAtStop(slot, stop):
            await engine.park(slot)
    finally:
        task.cancel()
        with engine.shielded(float("inf")):
            await task.wait()
    outcome = call.outcome
    if outcome is not None and (slot.value is not STOPPED or outcome.error is not None):
        value: T = outcome.unwrap()
        return value
    raise StopTraining(f"a stop was requested while waiting for {name_of(fn)}")


def name_of(fn: object) -> str:
    """What to call it in messages; the whole object of a bound method may be large."""
    return str(getattr(fn, "__qualname__", repr(fn)))
