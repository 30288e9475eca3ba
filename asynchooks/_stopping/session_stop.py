"""What stops one session, for which reason, and the side tasks that are the session's own.

It knows nothing of raw sessions, nor of what happens after a stop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ._engine import Engine
from ._recovery import Restart
from ._side_tasks import OnFailure, SideTask, SideTasks
from ._stop import Stop
from ._stop_reason import StopReason

logger = logging.getLogger("asynchooks")


class Owner(Protocol):
    """The connection of the session."""

    has_run: bool  # whether a step in a thread has succeeded since somebody set this to False

    def tell_coord(self, error: BaseException | None, reason: StopReason) -> None: ...


class SessionStop:
    """The stops of one `MonitoredSession`; its list of hooks makes it.

    `owner`, once there is one, is told of a stop that no recovery makes forgotten.

    Args:
        stop: what the session's waits end at: set by the caller and by the present coordinator.
    """

    __slots__ = (
        "_inputs", "_tasks", "error", "failure", "is_asked", "is_ending", "is_over", "owner",
        "reason", "run_stop", "stop",
    )  # fmt: skip

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.owner: Owner | None = None
        # what waits in a run end at: also when the coordinator is told of a preemption, by which
        # the run is to be made again
        self.run_stop = Stop()
        self.is_asked = False  # for good
        self.is_ending = False  # no further run begins
        self.is_over = False
        self.error: BaseException | None = None  # that the caller gave with the stop
        self.failure: BaseException | None = None  # the first of the session's own side tasks
        self.reason: StopReason | None = None  # who asked first to stop, and why
        self._tasks: SideTasks | None = None
        self._inputs: list[Callable[[], Awaitable[None]]] | None = None

    def request(self, error: BaseException | None, reason: StopReason) -> None:
        """Stop for good: no recovery makes it forgotten."""
        self.is_asked = True
        self.error = self.error or error
        self.reason = self.reason or reason
        self.stop.set()
        self.run_stop.set()
        if self.owner is not None:
            self.owner.tell_coord(error, reason)

    def note(self, reason: StopReason | None) -> None:
        """The first reason stands."""
        self.reason = self.reason or reason

    def set(self, *, for_runs_only: bool) -> None:
        """The coordinator was asked to stop; of a preemption only runs hear."""
        if not for_runs_only:
            self.stop.set()
        self.run_stop.set()

    def forget(self) -> None:
        """Of a stop that was not for good nothing is left."""
        if not self.is_asked:
            self.reason = None
            self.stop.clear()
            self.run_stop.clear()

    def start_soon(
        self,
        drive: Callable[[SideTask, tuple[Any, ...]], Awaitable[Any]],
        fn: SideTask,
        args: tuple[Any, ...],
        on_failure: OnFailure | Restart,
        name: str | None,
    ) -> None:
        """Start a side task of the session, which outlives a lost raw session."""
        if self._tasks is None:
            self._tasks = SideTasks(self.stop, drive, self._on_failed_task, lambda: self.is_ending)
        self._tasks.start(fn, args, on_failure, name)

    def _on_failed_task(self, error: BaseException, name: str) -> None:
        if self.is_over:
            logger.error("A side task failed after its session had ended", exc_info=error)
            return
        self.failure = self.failure or error
        if error is not self.failure:
            self.failure.add_note(f"then, in the side task {name!r}: {error!r}")
        self.request(None, StopReason(f"the side task {name!r}", repr(error), error))

    def add_input(self, close: Callable[[], Awaitable[None]]) -> None:
        """The session reads something, which is closed at its end."""
        self._inputs = [*(self._inputs or ()), close]

    async def close_inputs(self, error: BaseException | None) -> BaseException | None:
        """The session has ended; returns what leaves it."""
        for close in self._inputs or ():
            try:
                await close()
            except BaseException as closing:
                if error is not None:
                    error.add_note(f"then, closing the input: {closing!r}")
                error = error or closing
        return error

    @property
    def has_tasks(self) -> bool:
        return self._tasks is not None

    async def end_tasks(self, engine: Engine, until: float, *, cancel: bool) -> None:
        """As `SideTasks.end`; they were told to stop before."""
        if self._tasks is not None:
            await self._tasks.end(engine, until, cancel=cancel)
