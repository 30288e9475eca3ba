"""SessionStop: the stop of one session, and what its hooks may know of the session."""

from __future__ import annotations

import logging
from typing import Any

from .._engine.base import TIMED_OUT, Slot
from .._engine.current import current_engine
from .._engine.stop import Stop, StopReason
from .._errors import is_preemption
from .._log import fields
from .._step.gate import Worker
from .coordinator import Coordinator
from .tasks import TaskGroup

logger = logging.getLogger("asynchooks")

_PATIENCE_SECS = 10.0
"""How long the body of a block may do something else after a stop before the log asks for it."""


class SessionStop(Stop):
    """Made by the session's list of hooks, and all that is below sees of its session.

    It is set by the caller, by side tasks, by the coordinator of the present raw session unless
    that holds a preemption, and by what stops all workers.
    """

    def __init__(self) -> None:
        super().__init__()
        # a SessionHandle, of a room above; hooks of another library's loop have none
        self.handle: Any = None
        self.tasks = TaskGroup(self, self.request)  # the coordinator has its own
        self.coord: Coordinator | None = None  # of the present raw session
        self.worker: Worker | None = None  # there while the session is open
        self.worker_number: int | None = None  # for the log; a ProtocolHook knows it
        self.hook_reason: StopReason | None = None  # of a stop that a hook asked for in a run
        self.for_all: StopReason | None = None  # asked for by this session, for all of its model
        self.recovers = True  # a lost raw session is recreated
        self.input: Any = None  # of loops in the block; closed at the end
        self._body: Slot | None = None  # from a stop on: woken as the block ends

    @property
    def run_stop(self) -> Stop:
        """What waits in a run end at: also when a preemption is reported to the coordinator."""
        return self if self.coord is None else self.coord.stop

    def set(
        self,
        reason: StopReason | None = None,
        error: BaseException | None = None,
        *,
        for_good: bool = True,
        apart_from: Stop | None = None,
    ) -> None:
        was_set, worker = self.is_set, self.worker
        super().set(reason, error, for_good=for_good, apart_from=apart_from)
        if (
            self.is_set > was_set
            and worker is not None
            and worker.engine is not None
            and not self.is_ending
        ):
            worker.engine.start_soon(self._watch_body)

    async def _watch_body(self) -> None:
        """Log once if the body of the block goes on: no stop ends a wait of another library."""
        worker, engine = self.worker, current_engine()
        if worker is None or self.is_ending or self._body is not None:
            return
        slot = self._body = Slot(engine, "the end of the block")
        is_late = await engine.park(slot, engine.now() + _PATIENCE_SECS) is TIMED_OUT
        if is_late and self.is_set and not (self.is_ending or worker.is_running):
            logger.warning(
                "A stop was requested %g s ago, by %s, and the body of `async with` has neither "
                "ended nor run a step since. If it waits for another library, as by `await "
                "queue.get()`, a stop ends that as `await session.or_stop(queue.get)`",
                _PATIENCE_SECS,
                self.reason,
                extra=self.log_fields(self.reason),
            )

    def end(self) -> None:
        """What it belongs to ends."""
        self.is_ending = True
        if self._body is not None:
            self._body.wake()

    def is_curable(self, error: BaseException | None) -> bool:
        """Whether recreating the raw session makes an error of its coordinator forgotten."""
        return self.recovers and is_preemption(error)

    def names_of_tasks(self) -> tuple[str, ...]:
        """Of the side tasks that are running, also those of the coordinator; from any thread."""
        names = self.tasks.names()
        return names if self.coord is None else names + self.coord.tasks.names()

    def request(
        self, error: BaseException | None, reason: StopReason, *, all_workers: bool = False
    ) -> None:
        """Stop for good: no recovery makes it forgotten; this session, or all of its model."""
        if all_workers:
            self.for_all = reason  # first: it may be just opening
            reason = self._stop_all(reason)
        self.set(reason, error)

    def request_by_hook(self, reason: StopReason, all_workers: bool) -> None:
        """Let no further run begin; a recovery makes that forgotten, unless it is for all.

        The coordinator is stopped later, after `end` of all hooks.
        """
        if self.held is not None:
            self.held.append((reason, reason.error))
            return
        if all_workers:
            reason = self._stop_all(reason, apart_from=self)
        self.hook_reason = reason
        self.note(reason)

    def coord_stopped(
        self, error: BaseException | None, reason: StopReason, all_workers: bool
    ) -> None:
        """A hook, a thread or a side task of the raw session asked its coordinator to stop."""
        if not self.is_curable(error):
            self.set(reason, error, for_good=False)
        if all_workers:
            self._stop_all(reason)

    def _stop_all(self, reason: StopReason, apart_from: Stop | None = None) -> StopReason:
        if self.handle is not None:
            reason = self.handle.global_step.gate.stop_all(reason, apart_from)
        return reason

    def clear(self) -> None:
        super().clear()
        self.note(self.hook_reason)

    def forget(self) -> None:
        """A recovery: take back what was not for good; while the session ends, every stop is."""
        if self.is_ending:
            return
        self.hook_reason = None
        if not self.is_for_good:
            self.clear()
        if self.parent is not None and self.parent.is_set:  # by a hook of this one, for all
            self.set(self.parent.reason)

    def log_fields(self, reason: object) -> dict[str, Any]:
        """For records about this session; the step as it is known, which reads nothing."""
        step = None if self.handle is None else self.handle.global_step.last_known
        return fields(step=step, worker=self.worker_number, reason=reason)
