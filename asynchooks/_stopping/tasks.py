"""Side tasks: what runs beside a session, is watched, and never outlives it.

It decides nothing about when a session ends, nor what becomes of a failure that stops it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Any

from ._engine import STOPPED, Engine, EngineTask, Slot, current_engine
from ._errors import StopTraining, is_input_end, no_input_end
from ._recovery import Restart
from ._stop import EndsAtStop, Stop, surrounding_stop

logger = logging.getLogger("asynchooks")

_CANCEL_SECS = 1.0
"""How long a cancelled side task is waited for: one that shields a long call is left behind."""

_PATIENCE_SECS = 1.0
"""How long the end of a session waits for side tasks without a word."""

SideTask = Callable[..., Awaitable[Any]]


class OnFailure(Enum):
    """What an error in a side task leads to; a `Restart` is the third choice.

    KeyboardInterrupt, SystemExit and exception groups that hold more than errors always stop.
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
        except (Exception, KeyboardInterrupt, SystemExit, BaseExceptionGroup) as error:
            failure: BaseException = error
            if is_input_end(error):  # it could pass for the clean end of a session around this one
                failure = no_input_end(error, f"the side task {task.name!r}")
        except GeneratorExit:
            raise
        except BaseException as cancellation:
            if engine.is_being_cancelled():
                raise
            # what it waited for was cancelled, which must not pass for its own orderly end
            failure = RuntimeError("what the side task waited for was cancelled by somebody else")
            failure.__cause__ = cancellation
        else:
            return None
        failure.add_note(f"in the side task {task.name!r}")
        return failure

    async def _may_restart(
        self, engine: Engine, task: _Task, error: Exception, num_failures: int, restart: Restart
    ) -> bool:
        if num_failures > restart.max_attempts:
            error.add_note(f"it was restarted {restart.max_attempts} times before")
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
