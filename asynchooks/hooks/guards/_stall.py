"""StallHook: logs the stacks of all tasks when no run ends for a time, and stops training."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ... import _check
from ..._engine.base import TIMED_OUT, Engine, Slot
from ..._engine.current import current_engine
from ..._engine.stop import EndsAtStop, StopReason
from ..._errors import StallError
from ..._hook import SessionRunContext, SessionRunHook, SessionRunValues
from ..._log import fields
from ..._step.global_step import GlobalStep
from ..._stopping.coordinator import Coordinator
from ...backends._raw_session import raw_session_of
from ._dump import report
from ._thread import GuardThread

logger = logging.getLogger("asynchooks")


class OnStall(Enum):
    """What a stall leads to, apart from the stacks in the log.

    Example:
        hook = StallHook(secs=60.0, on_stall=OnStall.LOG)  # and training goes on
    """

    STOP = auto()
    """All workers of the model stop; a StallError leaves the session."""
    LOG = auto()
    """Nothing else; the next stall is logged again."""


@_check.names_options
class StallHook(SessionRunHook):
    """Logs the stacks of all tasks and threads when no run has ended for a time, and stops.

    The time starts when the raw session was created, and again with each `after_run` of this hook:
    a run that fails does not count. It is measured on the engine's clock, without polling, by a
    daemon thread, so that a step or hook that holds the event loop itself is seen, too. Each stall
    is logged once, at level ERROR of the logger "asynchooks"; the stacks show what holds the loop.

    The stop ends every wait of asynchooks, in all workers that share the model, and a StallError
    leaves the block of this one. A step that hangs in a thread is abandoned after the grace period
    (of a shared session: that of the worker which created it). Waits for other libraries end only
    through `session.or_stop` or `coord.or_stop`, and nothing ends code that holds the event loop.
    The watch itself ends at any stop, at this hook's `end` and with an error. It does not cover the
    creation of a session, nor the pauses of a `Recovery`.

    A wait within a run counts, also where it is intended: that of a worker for the first step of
    its `GlobalStepWaiterHook`, or for other workers under a protocol. Give `secs` above it, or give
    the hook to a worker that does not wait.

    Give it to one session at a time, to each worker its own.

    Args:
        secs: seconds without the end of a run that are a stall, > 0. They include saves,
            evaluations, calls of other workers that must not overlap, and the first step, which
            compiles.
        on_stall: `OnStall.STOP` or `OnStall.LOG`.

    Raises:
        TypeError: `secs` is not a number, or `on_stall` not an OnStall.
        ValueError: `secs` is not above 0, or not finite.
        StallError: out of the block: no run has ended for `secs` seconds.

    Example:
        async with MonitoredSession([StallHook(secs=600)], creator) as session:
            await session.run("loss")
    """

    acts_outside = True
    uses_default_graph = False
    _shown = (("secs", "_secs"),)

    def __init__(self, secs: float, on_stall: OnStall = OnStall.STOP) -> None:
        self._secs = _check.seconds("secs", secs)
        self._on_stall = _check.instance(
            "on_stall", on_stall, OnStall, "OnStall.STOP or OnStall.LOG"
        )
        self._watch: _Watch | None = None

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._close()
        engine = current_engine()
        grace_secs = raw_session_of(session).grace_secs
        watch = _Watch(
            engine, coord, session.global_step, self._secs, self._on_stall, grace_secs, engine.now()
        )
        if engine.is_virtual:  # a thread cannot measure simulated time
            coord.start_soon(watch.keep, name="StallHook")
        else:
            watch.thread = GuardThread(watch.look, self._secs, "asynchooks-stall")
        self._watch, self._now = watch, engine.now

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._watch.last = self._now()  # type: ignore[union-attr]  # there is one while runs end

    async def end(self, session: Any) -> None:
        self._close()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self._close()

    def on_drop(self) -> None:
        if self._watch is not None and self._watch.thread is not None:
            self._watch.thread.let_go()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()


@dataclass(eq=False, repr=False)
class _Watch:
    """Watches one raw session, from a thread, or in virtual time by a side task."""

    engine: Engine
    coord: Coordinator
    step: GlobalStep
    secs: float
    on_stall: OnStall
    grace_secs: float  # after the stop, for a step that hangs in a thread
    last: float  # when the last run ended
    reported: float | None = None  # the last stall that was reported, by its `last`
    error: StallError | None = None  # with which the session was stopped
    stopped_at: float = 0.0
    is_closed: bool = False
    thread: GuardThread | None = None

    def close(self) -> None:
        """Report no more stalls; may be called again, and from any thread."""
        self.is_closed = True
        if self.thread is not None:
            self.thread.close()

    async def keep(self) -> None:
        """Look at each moment at which there may be a stall, up to a stop."""
        pause: float | None = self.secs
        while pause is not None:
            slot = Slot(self.engine, "the end of a run, or a stall")
            with EndsAtStop(slot, None):
                if await self.engine.park(slot, self.engine.now() + pause) is not TIMED_OUT:
                    return
            pause = self.look()

    def look(self) -> float | None:
        """Report a new stall, then abandon a step that hangs; returns the pause until then.

        A run that ends after this has its own time, so the next stall is `secs` away at least.
        """
        now, last = self.engine.now(), self.last
        if self.error is not None:
            left = self.stopped_at + self.grace_secs - now
            if left > 0:
                return left
            message = str(self.error)
            self.coord.lost_step.report(lambda: StallError(message))
            return None
        if self.is_closed or self.coord.should_stop():
            return None
        if now < last + self.secs:
            return last + self.secs - now
        if last != self.reported:
            self.reported = last
            self._report(now, last)
        return self.secs if self.error is None else self.grace_secs

    def _report(self, now: float, last: float) -> None:
        since = f"has ended for {now - last:.4g} s, since global step {self.step.value}"
        what = f"no run of this session {since}"
        stacks = report(self.engine.running_tasks)
        extra = fields("StallHook", step=self.step.last_known, reason=what)
        logger.error("StallHook: %s. All tasks and threads:\n%s", what, stacks, extra=extra)
        if self.on_stall is OnStall.LOG:
            return
        self.stopped_at = self.engine.now()
        self.error = error = StallError(
            f"{what}; the log says what all tasks and threads were doing. "
            "If a run may take longer, its waits for other workers included, give StallHook more "
            f"than {self.secs:g} s"
        )
        # other workers read it, too
        reason = StopReason("StallHook", f"no run of its session {since}", error)
        with suppress(StallError):  # the session has ended meanwhile, and reports no more errors
            self.coord.request_stop(error, reason=reason, all_workers=True)
