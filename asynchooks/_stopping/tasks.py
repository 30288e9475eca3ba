"""Side tasks run beside a session, are supervised, and never outlive it.

An error of one stops the session, unless its `OnFailure` or `Restart` says otherwise: every wait
ends, and the next run raises StopTraining. The stop holds the error, which leaves the block behind
`end` of the hooks; others that fail later are notes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from .._check import function, instance
from .._engine.base import STOPPED, Engine, EngineTask, Slot
from .._engine.current import current_engine
from .._engine.recording import Kind, current_recorder, ended
from .._engine.stacks import holds_loop
from .._engine.stop import EndsAtStop, Stop, StopReason, surrounding_stop
from .._engine.threads import Outcome
from .._errors import StopTraining, add_note, is_input_end, leaves_of, no_input_end
from .._log import fields
from .backoff import Restart

logger = logging.getLogger("asynchooks")

T = TypeVar("T")

_CANCEL_SECS = 1.0
"""How long a cancelled side task is waited for: one that shields a long call is left behind."""

_PATIENCE_SECS = 1.0
"""How long the end of a session waits for side tasks without a warning."""

_FN_IS = "an async function, then its arguments"
SideTask = Callable[..., Awaitable[Any]]
InContext = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
"""Gives what to await for a coroutine, in what surrounds a session."""


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


class TaskGroup:
    """The side tasks of one session, or of one coordinator. Unlike a nursery, no block holds them.

    Args:
        stop: ends every wait of asynchooks in them.
        fail: the one way that an error of a task goes, with the reason for a stop.
    """

    def __init__(self, stop: Stop, fail: Callable[[BaseException, StopReason], None]) -> None:
        self.stop = stop
        self.fail = fail
        self.in_context: InContext = lambda coroutine: coroutine
        """Gives what to await for a task, in what surrounds the session."""
        self.running: dict[_Task, None] = {}  # in order of their starts

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
        function("fn", fn, _FN_IS, arguments=True)
        expected = "OnFailure.STOP, OnFailure.LOG or a Restart(max_attempts=...)"
        instance("on_failure", on_failure, (OnFailure, Restart), expected)
        instance("cancel_at_end", cancel_at_end, bool, "True or False")
        task = _Task(self, current_engine(), name or name_of(fn), cancel_at_end, on_failure)
        self.running[task] = None
        task.engine_task = task.engine.start(task.run, fn, args)

    def names(self) -> tuple[str, ...]:
        """Of those that are running, in the order of their starts; from any thread."""
        return tuple(task.name for task in list(self.running))

    def cancel(self, *, all_tasks: bool) -> None:
        """Cancel those with `cancel_at_end`, or all; does not wait for them."""
        for task in self.running:
            if all_tasks or task.cancel_at_end:
                task.engine_task.cancel()

    async def end(self, engine: Engine, until: float, *, cancel: bool) -> None:
        """Wait for all until then, on the engine's clock, and cancel them; at once if `cancel`.

        Those with `cancel_at_end` are cancelled at once in any case, and have until then to clean
        up. A stop was requested before. Cancellation leaves at once; call it again, shielded.
        """
        soon = min(until, engine.now() + _PATIENCE_SECS)
        self.cancel(all_tasks=cancel)
        have_time = [task for task in self.running if task.cancel_at_end or not cancel]
        late = [task for task in have_time if not await task.engine_task.wait(soon)]
        for is_cancelled, text in _LATE.items():
            names = [task.name for task in late if task.cancel_at_end is is_cancelled]
            if names and soon < until:
                logger.warning(text, until - soon, ", ".join(names))
        while waited := list(self.running):
            self.cancel(all_tasks=cancel)  # also those that others have started meanwhile
            for task in waited:
                if not (cancel or task.cancel_at_end):
                    await task.engine_task.wait(until)
                    task.engine_task.cancel()
            last = engine.now() + _CANCEL_SECS
            for task in waited:
                patience = max(last, until) if task.cancel_at_end else last
                if not await task.engine_task.wait(patience):
                    logger.error(
                        "The side task %s did not end when it was cancelled: left alone", task.name
                    )
                self.running.pop(task, None)

    async def or_stop(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run `fn(*args)` in a task of its own; StopTraining at a stop, which cancels it.

        Cancellation cancels it, too; in both cases it has ended when this returns.
        """
        function("fn", fn, _FN_IS, arguments=True)
        name = name_of(fn)
        if self.stop.is_set:
            raise StopTraining(f"a stop was requested before {name} was called")
        slot = Slot(current_engine(), f"{name} or a stop")
        with EndsAtStop(slot, self.stop):
            outcome = await run_beside(slot, lambda: self.in_context(_call(fn, args)))
        if outcome is None:
            raise StopTraining(f"a stop was requested while waiting for {name}")
        value: T = outcome.unwrap()
        return value


_LATE = {
    True: "Waiting up to %g s more for side tasks that were cancelled to clean up: %s",
    False: (
        "Waiting up to %g s more for side tasks to stop before they are cancelled: %s. Their waits "
        "end at once through session.or_stop(fn, *args) or coord.or_stop(fn, *args), or by "
        "start_soon(fn, *args, cancel_at_end=True)"
    ),
}
"""What is said of side tasks that are waited for: whether they were cancelled, and the text."""


@dataclass(eq=False)
class _Task:
    """One side task; there from its start to its end."""

    group: TaskGroup
    engine: Engine
    name: str
    cancel_at_end: bool
    on_failure: OnFailure | Restart
    engine_task: EngineTask = None  # type: ignore[assignment]  # set at once

    def __str__(self) -> str:
        return f"the side task {self.name!r}"

    @holds_loop(str)
    async def run(self, fn: SideTask, args: tuple[Any, ...]) -> None:
        """Run it, again after a failure that allows it; no error goes to the event loop."""
        surrounding_stop.set(self.group.stop)
        num_failures, policy = 0, self.on_failure
        try:
            while (error := await self._failure_of(fn, args)) is not None:
                num_failures += 1
                if not isinstance(error, Exception) or policy is OnFailure.STOP:
                    self._fail(error)
                elif isinstance(policy, OnFailure):
                    text = "The side task %s failed; training goes on without it"
                    self._log(logging.ERROR, error, text, exc_info=error)
                elif num_failures > policy.max_attempts:
                    add_note(error, f"it was restarted {policy.max_attempts} times before")
                    self._fail(error)
                elif await self._pause(error, num_failures, policy):
                    continue
                return
        finally:
            self.group.running.pop(self, None)

    async def _failure_of(self, fn: SideTask, args: tuple[Any, ...]) -> BaseException | None:
        """Run it once; returns what it raised, unless that was StopTraining.

        Tasks in a group of its own may each have raised one.
        """
        span, recorder = None, current_recorder()
        if recorder is not None:
            span = recorder.task_span(self.engine, Kind.SIDE_TASK, self.name)
        try:
            with ended(span):
                await self.group.in_context(_call(fn, args))
        except BaseException as error:
            failure = self.engine.failure_in(error)
            if failure is None:
                raise
            if all(isinstance(each, StopTraining) for each in leaves_of(failure)):
                if not (self.group.stop.is_set or self.group.stop.is_ending):
                    self._log(
                        logging.WARNING,
                        failure,
                        "The side task %s has ended by %r, though no stop was requested; training "
                        "goes on. To end it: session.request_stop()",
                        failure,
                    )
                return None
            if is_input_end(failure):  # it could pass for the clean end of a session around this
                failure = no_input_end(failure, str(self))
            add_note(failure, f"in {self}")
            return failure
        return None

    def _log(
        self, level: int, error: BaseException, text: str, *args: object, **options: Any
    ) -> None:
        logger.log(level, text, self.name, *args, extra=fields(reason=repr(error)), **options)

    def _fail(self, error: BaseException) -> None:
        if self in self.group.running:
            self._log(logging.ERROR, error, "The side task %s failed, so training stops: %r", error)
            self.group.fail(error, StopReason(str(self), repr(error), error))
        else:  # it was left alone
            text = "The side task %s failed after its session had ended"
            self._log(logging.ERROR, error, text, exc_info=error)

    async def _pause(self, error: Exception, num_failures: int, restart: Restart) -> bool:
        """Wait until the next attempt is due; returns whether it is made: not after a stop."""
        pause = restart.pause_before(num_failures)
        then = f"; restarting it, attempt {num_failures} of {restart.max_attempts}, in {pause:g} s"
        if self.group.stop.is_set:
            then = " after a stop was requested: not restarted"
        text = f"The side task %s failed (%s: %s){then}"
        self._log(logging.WARNING, error, text, type(error).__name__, error)
        slot = Slot(self.engine, f"the next attempt of the side task {self.name}")
        with EndsAtStop(slot, self.group.stop):
            return await self.engine.park(slot, self.engine.now() + pause) is not STOPPED


async def run_beside(slot: Slot, fn: Callable[..., Awaitable[Any]], *args: Any) -> Outcome | None:
    """Run `fn(*args)` in a task of its own, until it ends or the slot is woken.

    Returns how it ended; None where it was cancelled for what had woken the slot, which a
    cancellation of the caller does as well. It has ended when this returns or raises.
    """
    engine = slot.engine
    outcome: Outcome | None = None

    async def run() -> None:
        nonlocal outcome
        try:
            outcome = Outcome(await fn(*args))
        except BaseException as error:
            failure = engine.failure_in(error)
            if failure is not None or not slot.is_woken:  # or something else has cancelled it
                outcome = Outcome(error=failure or error)
            if failure is None:
                raise
        finally:
            slot.wake()

    task = engine.start(run)
    try:
        await engine.park(slot)
    finally:
        slot.wake(STOPPED)
        if outcome is None:
            task.cancel()
        with engine.shielded(float("inf")):
            await task.wait()
    is_late = outcome is not None and slot.value is not None and outcome.error is None
    return None if is_late else outcome


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
