"""StallHook: says what all tasks are doing when no step ends any more, and stops training."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from ..._engine import stacks as _stacks
from ..._engine.base import TIMED_OUT, Engine, Slot
from ..._engine.current import current_engine
from ..._engine.stop import EndsAtStop, StopReason
from ..._errors import StallError
from ..._hook import SessionRunContext, SessionRunHook, SessionRunValues
from ..._step.global_step import GlobalStep
from ..._stopping.coordinator import Coordinator
from ...backends._raw_session import raw_session_of
from .._arguments import as_secs
from ._thread import GuardThread

logger = logging.getLogger("asynchooks")

_HEAD_START, _SHORTEST_SECS, _LONGEST_SECS = 0.1, 0.25, 1.0
"""What the event loop gets before the thread concludes that it is held: a share of the time."""


class OnStall(Enum):
    """What a stall leads to, beside the dump in the log."""

    STOP = auto()
    """All workers of the model stop; a StallError leaves the session."""
    LOG = auto()
    """Nothing more; the next stall is logged again."""


class StallHook(SessionRunHook):
    """Logs the stacks of all tasks and threads when no run has ended for a time, and stops.

    The time starts when the raw session was created, and anew with each `after_run` of this hook:
    a run that fails does not count. It is measured on the engine's clock, without polling. A
    daemon thread keeps the same watch in real time, for a step or hook that holds the event loop
    itself; it waits a tenth longer (a quarter to one second), so that what it says of the loop is
    true. There is one dump for a stall, at level ERROR of the logger "asynchooks".

    By the stop every wait of asynchooks ends, in all workers that share the model, and a StallError
    leaves the block of this one. A step that hangs
    in a thread is given up after the grace period (of a shared session: that of the worker which
    created it). What waits for something else ends only if it waits through `session.or_stop` or
    `coord.or_stop`, and what holds the event loop is ended by nothing. The watch itself ends at
    any stop, at this hook's `end` and with an error. It does not see the creation of a session,
    nor the pauses of a `Recovery`.

    You make it and give it to one session at a time, to each worker its own.

    Args:
        secs: seconds without the end of a run that are a stall, > 0. Saving, evaluating, other
            workers' calls where they must not overlap, and the first step (which compiles) take
            their time, too.
        on_stall: `OnStall.STOP` or `OnStall.LOG`.

    Raises:
        TypeError: `secs` is no number, or `on_stall` is no OnStall.
        ValueError: `secs` is not above 0, or not finite.
        StallError: out of the block: no run has ended for `secs` seconds.

    Example:
        async with MonitoredSession([StallHook(secs=600)], creator) as session:
            await session.run("loss")
    """

    _looks_at_default_graph = False
    _shown = (("secs", "_secs"),)

    def __init__(self, secs: float, on_stall: OnStall = OnStall.STOP) -> None:
        self._secs = as_secs("secs", secs)
        if not isinstance(on_stall, OnStall):
            raise TypeError(f"on_stall is {on_stall!r}; give OnStall.STOP or OnStall.LOG")
        self._on_stall = on_stall
        self._watch: _Watch | None = None

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._close()
        engine = current_engine()
        watch = _Watch(engine, coord, session.global_step, self._secs, self._on_stall)
        coord.start_soon(watch.keep, name="StallHook")
        if not engine.is_virtual:  # where time is simulated a thread has nothing to measure
            # not in the side task: it has not run yet, and the first step may hold the event loop
            watch.start_thread(raw_session_of(session).grace_secs)
        self._watch, self._now = watch, engine.now

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._watch.last = self._now()  # type: ignore[union-attr]  # there is one while runs end

    async def end(self, session: Any) -> None:
        self._close()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()


class _Watch:
    """The watch over one raw session: by a side task, and by a thread. The hook closes it."""

    __slots__ = (
        "_coord", "_engine", "_error", "_is_closed", "_lock", "_on_stall", "_secs", "_slot",
        "_step", "_thread", "_told_at", "_told_of", "last",
    )  # fmt: skip

    def __init__(
        self, engine: Engine, coord: Coordinator, step: GlobalStep, secs: float, on_stall: OnStall
    ) -> None:
        self._engine = engine
        self._coord = coord
        self._step = step
        self._secs = secs
        self._on_stall = on_stall
        self.last = engine.now()  # when the last run ended
        self._lock = threading.Lock()  # guards the next three: a stall is told of once
        self._told_of: float | None = None  # the last stall that was told of, by its `last`
        self._told_at = 0.0
        self._error: StallError | None = None  # what the session was stopped with
        self._slot = Slot(engine, "the end of a run, or a stall")
        self._is_closed = False
        self._thread: GuardThread | None = None

    def close(self) -> None:
        """From now on nothing is a stall; may be called again, and from any thread."""
        self._is_closed = True
        self._slot.wake()  # the side task makes a new one only before it looks at the flag
        if self._thread is not None:
            self._thread.close()

    async def keep(self) -> None:
        """The side task: look at each moment at which a stall may have become one."""
        try:
            until = self.last + self._secs
            while not self._is_closed:
                with EndsAtStop(self._slot, None):
                    if await self._engine.park(self._slot, until) is not TIMED_OUT:
                        break
                self._slot = Slot(self._engine, self._slot.what)
                until = self._look(self._secs)
        finally:
            if self._error is None:  # else the thread still has a step to give up
                self.close()

    def start_thread(self, grace_secs: float) -> None:
        """Look from outside of the event loop, too, and give up a step that hangs in a thread.

        Args:
            grace_secs: seconds, >= 0, that such a step gets after the stop.
        """
        secs = self._secs + min(max(_HEAD_START * self._secs, _SHORTEST_SECS), _LONGEST_SECS)

        def look() -> float | None:
            until = self.last if self._error is not None else self._look(secs, in_thread=True)
            now = self._engine.now()
            if self._error is None:
                return max(0.0, until - now)
            if now < self._told_at + grace_secs:
                return self._told_at + grace_secs - now
            message = str(self._error)
            self._coord.loss.report(lambda: StallError(message))
            return None

        self._thread = GuardThread(look, secs, "asynchooks-stall")

    def _look(self, secs: float, *, in_thread: bool = False) -> float:
        """Tell of a stall of that length that nobody has told of; returns when to look again.

        A run that ends after this has its own time, so the next stall is `secs` away at least.
        """
        now, last = self._engine.now(), self.last
        if now < last + secs:
            return last + secs
        with self._lock:  # whoever comes second finds what the first one has led to
            if last != self._told_of and not self._is_closed:
                self._told_of = last
                self._tell(now, last, in_thread)
        return now + secs

    def _tell(self, now: float, last: float, in_thread: bool) -> None:
        since = (
            f"has ended for {now - last:.4g} s, since global step {self._step.value}"
            f"{', and the event loop is held' if in_thread else ''}"
        )
        what = f"no run of this session {since}"
        stacks = _stacks.report(self._engine.running_tasks)
        logger.error("StallHook: %s. What everybody is doing:\n%s", what, stacks)
        if self._on_stall is OnStall.LOG:
            return
        self._told_at = self._engine.now()
        self._error = error = StallError(
            f"{what}; the log says what all tasks and threads were doing. "
            f"If a run may take longer, give StallHook more than {self._secs:g} s"
        )
        # as the other workers read it, too
        reason = StopReason("StallHook", f"no run of its session {since}", error)
        with suppress(StallError):  # the session has ended meanwhile, and reports no more errors
            self._coord.request_stop(error, reason=reason, all_workers=True)
