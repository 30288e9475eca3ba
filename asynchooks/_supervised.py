"""What ends a session, and what runs beside it: its side, and its users', of every stop.

It neither opens a session nor runs a step.
"""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ._connection import Connection
from ._engine import Engine
from ._errors import StopTraining
from ._or_stop import name_of, or_stop
from ._phase import Phase
from ._recovery import Restart
from ._session_creator import Lease
from ._side_tasks import OnFailure, SideTask
from ._stop import Stop
from ._stop_reason import StopReason, reason_for

if TYPE_CHECKING:
    from .data import Batches

logger = logging.getLogger("asynchooks")

T = TypeVar("T")


class Supervised(ABC):
    """The part of `MonitoredSession` that stops it and watches its side tasks."""

    _connection: Connection
    _engine: Engine  # from opening on
    _lease: Lease
    _phase: Phase
    _stop: Stop  # what its waits end at

    def should_stop(self) -> bool:
        """Whether the training loop should end; never raises, never does work."""
        is_over = self._phase in (Phase.CLOSING, Phase.CLOSED)
        return is_over or self._is_at_limit or self._connection.should_stop()

    @property
    def _is_at_limit(self) -> bool:
        step = self._lease.global_step
        return step.limit is not None and step.value >= step.limit

    @property
    def stop_reason(self) -> StopReason | None:
        """Who ended training, and why: the first who asked, or what left the block; else None."""
        step, reason = self._lease.global_step, self._connection.stops.reason
        if reason is None and self._is_at_limit:
            reason = StopReason("the limit", f"{step.name} is at {step.value} of {step.limit}")
        return reason

    def request_stop(self, reason: StopReason | str | BaseException | None = None) -> None:
        """Ask the training loop to end: should_stop() turns True and every wait ends.

        From any thread or task, before or after opening.

        Args:
            reason: why, for the log and `stop_reason`; an exception leaves at the end of the block.
        """
        why = reason_for(None, reason, "session.request_stop")
        logger.info("Stop requested: %s", why.why)
        self._connection.stops.request(why.error, why)

    def start_soon(
        self,
        fn: SideTask,
        *args: Any,
        on_failure: OnFailure | Restart = OnFailure.STOP,
        name: str | None = None,
    ) -> None:
        """Start `fn(*args)` as a side task: it never outlives the session.

        An error in it stops the session, unless `on_failure` says otherwise, and leaves the block
        as itself. At the end it is told (every wait of asynchooks in it raises StopTraining), gets
        the grace period, and is cancelled then. Unlike `coord.start_soon` in a hook, it goes on
        when a lost raw session is recreated.

        Args:
            on_failure: `OnFailure.STOP`, `OnFailure.LOG` or a `Restart`.
            name: what to call it in logs and reasons; by default what `fn` is called.

        Raises:
            RuntimeError: the session is not open.
            StopTraining: it ends just now, and this is a side task of it.
            TypeError: `fn` cannot be called, or `on_failure` is no policy.
        """
        self._check_ends(fn)
        self._phase.check_open("start_soon", in_opening=True)
        self._connection.start_soon(fn, args, on_failure, name)

    def batches(self, source: Any) -> Batches:
        """The items of a source, for as long as training goes on: `async for x in ...`.

        It reads one item ahead, or as many as the source's own `prefetch`; it ends with the
        source, and when the session should stop, also while it waits. The session opens the source
        (unless that was done) and closes it at its own end; `aclose` does so earlier. What the
        loop was given and no run has used is not lost: see `InputPositionHook`.

        Args:
            source: see `asynchooks.data`.

        Raises:
            TypeError: `source` cannot be read.
            RuntimeError: the session is not open.
            InputError: out of the loop: the source is empty, or cannot be read.
            BaseException: out of the loop: what the source raised.
        """
        from .data._batches import Batches  # most sessions need none of it

        self._phase.check_open("batches")
        return Batches(source, self._connection.stops, self._lease.global_step, self.should_stop)

    async def or_stop(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await `fn(*args)`, a wait of another library, but no longer than until a stop.

        It runs in a task of its own, which has ended when this returns or raises.

        Raises:
            StopTraining: the session was asked to stop; `fn` was cancelled.
            BaseException: what `fn` raised.
        """
        self._check_ends(fn)
        self._phase.check_open("or_stop", in_opening=True)
        return await or_stop(self._engine, self._stop, self._lease.drive_call, fn, *args)

    def _check_ends(self, fn: object) -> None:
        if self._phase is Phase.CLOSING:  # a side task that has not ended yet
            raise StopTraining(f"the session ends, before {name_of(fn)} was called")
