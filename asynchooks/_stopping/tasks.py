"""Side tasks run beside a session, are supervised, and never outlive it.

What a failure does to the session is decided in `session_stop.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

from .._check import async_function, instance
from .._engine.base import STOPPED, Engine, EngineTask, Slot
from .._engine.current import current_engine
from .._engine.recording import Kind, Recorder, current_recorder, ended
from .._engine.stacks import holds_loop
from .._engine.stop import EndsAtStop, Stop, StopReason, surrounding_stop
from .._engine.threads import Outcome
from .._errors import StopTraining, add_note, is_input_end, no_input_end
from .._log import fields
from .backoff import Restart

logger = logging.getLogger("asynchooks")

_CANCEL_SECS = 1.0
"""How long a cancelled side task is waited for: one that shields a long call is left behind."""

_PATIENCE_SECS = 1.0
"""How long the end of a session waits for side tasks without a warning."""

SideTask = Callable[..., Awaitable[Any]]
InContext = Callable[[Coroutine[Any, Any, Any], Callable[[], str]], Awaitable[Any]]
"""Gives what to await for a coroutine, in what surrounds a session; the name is for errors."""


class OnFailure(Enum):
    """What an error in a side task leads to; a `Restart` is the third choice.

    What is no Exception always stops: an exit, or the cancellation of something that it awaited.

    Example:
        async def report():
            raise ConnectionError("the dashboard is away")

        async with MonitoredSession([], creator) as session:
            session.start_soon(report, on_failure=OnFailure.LOG)  # training goes on
            await session.run("loss")
    """

    STOP = auto()
    """The session stops; the error leaves it as itself."""
    LOG = auto()
    """The error is logged, and training goes on without the task."""


@dataclass(slots=True, eq=False)
class SideTasks:
    """The side tasks of one session, or of one coordinator, which makes it and ends it."""

    stop: Stop  # ends every wait of asynchooks in them
    in_context: InContext
    fail: Callable[[BaseException, StopReason], None]  # stops the session by an error
    is_over: Callable[[], bool]  # the session has ended: an error can only be logged
    is_ending: Callable[[], bool] = lambda: False  # a task may leave by StopTraining
    running: dict[_Task, None] = field(default_factory=dict)  # in order of their starts

    def start(
        self,
        fn: SideTask,
        args: tuple[Any, ...],
        on_failure: OnFailure | Restart = OnFailure.STOP,
        name: str | None = None,
        cancel_at_end: bool = False,
    ) -> None:
        """Start `fn(*args)`.

        Raises:
            TypeError: `fn` cannot be called, `on_failure` is no policy, or `cancel_at_end` no bool.
        """
        _check_async_function(fn)
        instance(
            "on_failure", on_failure, (OnFailure, Restart),
            "OnFailure.STOP, OnFailure.LOG or a Restart(max_attempts=...)",
        )  # fmt: skip
        instance("cancel_at_end", cancel_at_end, bool, "True or False")
        task = _Task(self, current_engine(), name or name_of(fn), cancel_at_end)
        self.running[task] = None
        task.engine_task = task.engine.start(task.run, fn, args, on_failure)

    def names(self) -> tuple[str, ...]:
        """Of those that are running, in the order of their starts; from any thread."""
        return tuple([task.name for task in list(self.running)]) if self.running else ()

    def cancel(self, *, all_tasks: bool) -> None:
        """Cancel those with `cancel_at_end`, or all; does not wait for them."""
        for task in self.running:
            if all_tasks or task.cancel_at_end:
                task.cancel()

    async def end(self, engine: Engine, until: float, *, cancel: bool) -> None:
        """Wait for all until then, on the engine's clock, and cancel them; at once if `cancel`.

        Those with `cancel_at_end` are cancelled at once in any case, and have until then to clean
        up. A stop was requested before. Cancellation leaves at once; call it again, shielded.
        """
        self.cancel(all_tasks=cancel)
        await self._warn_of_late_tasks(engine, until, is_cancelled=cancel)
        left: set[_Task] = set()
        while waited := [task for task in self.running if task not in left]:
            self.cancel(all_tasks=cancel)  # also those that others have started meanwhile
            for task in waited:
                if not (cancel or task.cancel_at_end or await task.wait(until)):
                    task.cancel()
            last = engine.now() + _CANCEL_SECS
            for task in waited:
                if not await task.wait(max(last, until) if task.cancel_at_end else last):
                    left.add(task)
                    logger.error(
                        "The side task %s did not end when it was cancelled: left alone", task.name
                    )
        self.running.clear()

    async def _warn_of_late_tasks(
        self, engine: Engine, until: float, *, is_cancelled: bool
    ) -> None:
        waited = [task for task in self.running if task.cancel_at_end or not is_cancelled]
        soon = min(until, engine.now() + _PATIENCE_SECS)
        late = [task for task in waited if not await task.wait(soon)]
        if soon == until:
            return
        if names := [task.name for task in late if task.cancel_at_end]:
            logger.warning(
                "Waiting up to %g s more for side tasks that were cancelled to clean up: %s",
                until - soon, ", ".join(names),
            )  # fmt: skip
        if names := [task.name for task in late if not task.cancel_at_end]:
            logger.warning(
                "Waiting up to %g s more for side tasks to stop before they are cancelled: %s. "
                "Their waits end at once through session.or_stop(fn, *args) or "
                "coord.or_stop(fn, *args), or by start_soon(fn, *args, cancel_at_end=True)",
                until - soon, ", ".join(names),
            )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Task:
    """One side task; there from its start to its end."""

    tasks: SideTasks
    engine: Engine
    name: str
    cancel_at_end: bool
    engine_task: EngineTask | None = None

    def __str__(self) -> str:
        return f"the side task {self.name!r}"

    async def wait(self, until: float) -> bool:
        return self.engine_task is None or await self.engine_task.wait(until)

    def cancel(self) -> None:
        if self.engine_task is not None:
            self.engine_task.cancel()

    @holds_loop(str)
    async def run(
        self, fn: SideTask, args: tuple[Any, ...], on_failure: OnFailure | Restart
    ) -> None:
        """Run it, again after a failure that allows it; no error goes to the event loop."""
        surrounding_stop.set(self.tasks.stop)
        num_failures = 0
        recorder = current_recorder()
        try:
            while (error := await self._failure_of(fn, args, recorder)) is not None:
                num_failures += 1
                if isinstance(error, Exception) and on_failure is OnFailure.LOG:
                    logger.error(
                        "The side task %s failed; training goes on without it",
                        self.name, exc_info=error, extra=fields(reason=repr(error)),
                    )  # fmt: skip
                elif isinstance(error, Exception) and isinstance(on_failure, Restart):
                    if await self._may_restart(error, num_failures, on_failure):
                        continue
                else:
                    text = "The side task %s failed, so training stops: %r"
                    logger.error(text, self.name, error, extra=fields(reason=repr(error)))
                    self._fail(error)
                return
        finally:
            self.tasks.running.pop(self, None)

    async def _failure_of(
        self, fn: SideTask, args: tuple[Any, ...], recorder: Recorder | None
    ) -> BaseException | None:
        """Run it once; returns what it raised, unless that was StopTraining at a stop.

        Tasks in a group of its own may each have raised one.
        """
        try:
            span = None
            if recorder is not None:
                span = recorder.task_span(self.engine, Kind.SIDE_TASK, self.name)
            with ended(span):
                await self.tasks.in_context(_call(fn, args), self.__str__)
        except StopTraining as error:
            self._note_end(error)
        except BaseException as error:
            failure = self.engine.failure_in(error)
            if failure is None:
                raise
            if isinstance(failure, BaseExceptionGroup) and failure.split(StopTraining)[1] is None:
                self._note_end(failure)
                return None
            if is_input_end(failure):  # it could pass for the clean end of a session around this
                failure = no_input_end(failure, str(self))
            add_note(failure, f"in {self}")
            return failure
        return None

    def _note_end(self, error: BaseException) -> None:
        if not (self.tasks.stop.is_set or self.tasks.is_ending()):
            logger.warning(
                "The side task %s has ended by %r, though no stop was requested; training "
                "goes on. To end it: session.request_stop()", self.name, error,
                extra=fields(reason=repr(error)),
            )  # fmt: skip

    def _fail(self, error: BaseException) -> None:
        if self.tasks.is_over():
            text = "A side task failed after its session had ended"
            logger.error(text, exc_info=error, extra=fields(reason=repr(error)))
        else:
            self.tasks.fail(error, StopReason(str(self), repr(error), error))

    async def _may_restart(self, error: Exception, num_failures: int, restart: Restart) -> bool:
        if num_failures > restart.max_attempts:
            add_note(error, f"it was restarted {restart.max_attempts} times before")
            text = "The side task %s failed again, so training stops: %r"
            logger.error(text, self.name, error, extra=fields(reason=repr(error)))
            self._fail(error)
            return False
        if self.tasks.stop.is_set:
            logger.warning(
                "The side task %s failed (%s: %s) after a stop was requested: not restarted",
                self.name, type(error).__name__, error, extra=fields(reason=repr(error)),
            )  # fmt: skip
            return False
        pause = restart.pause_before(num_failures)
        logger.warning(
            "The side task %s failed (%s: %s); restarting it, attempt %d of %d, in %g s",
            self.name, type(error).__name__, error, num_failures, restart.max_attempts, pause,
            extra=fields(reason=repr(error)),
        )  # fmt: skip
        slot = Slot(self.engine, f"the next attempt of the side task {self.name}")
        with EndsAtStop(slot, self.tasks.stop):
            return await self.engine.park(slot, self.engine.now() + pause) is not STOPPED


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class SlotCall:
    """A call in a task of its own, whose end wakes a slot, where the caller waits."""

    _engine: Engine
    _slot: Slot
    outcome: Outcome | None = None
    """None where its task was cancelled after the slot was woken."""

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
    in_context: InContext,
    fn: Callable[..., Awaitable[T]],
    *args: Any,
) -> T:
    """Run `fn(*args)` in a task of its own; StopTraining at a stop, which cancels it.

    Cancellation cancels it, too; in both cases it has ended when this returns.
    """
    _check_async_function(fn)
    if stop.is_set:
        raise StopTraining(f"a stop was requested before {name_of(fn)} was called")
    slot = Slot(engine, f"{name_of(fn)} or a stop")
    call = SlotCall(engine, slot)
    task = engine.start(call.run, lambda: in_context(_call(fn, args), lambda: name_of(fn)))
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


def _check_async_function(fn: object) -> None:
    async_function("fn", fn, "an async function, then its arguments", arguments=True)


async def _call(fn: SideTask, args: tuple[Any, ...]) -> Any:
    result = fn(*args)
    if not isinstance(result, Awaitable):
        raise TypeError(
            f"{fn!r} is no async function: it returned {result!r}, which cannot be awaited, and "
            "held the event loop. Call it through anyio.to_thread.run_sync"
        )
    return await result


def name_of(fn: object) -> str:
    """What to call it in messages; the whole object of a bound method may be large."""
    return str(getattr(fn, "__qualname__", repr(fn)))
