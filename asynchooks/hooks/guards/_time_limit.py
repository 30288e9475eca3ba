"""TimeLimitHook: ends training after a time."""

from __future__ import annotations

import logging
from typing import Any

from ... import _check
from ..._engine.base import TIMED_OUT, Slot
from ..._engine.current import current_engine
from ..._engine.stop import EndsAtStop, StopReason
from ..._hook import SessionRunHook
from ..._log import fields
from ..._stopping.coordinator import Coordinator

logger = logging.getLogger("asynchooks")


@_check.names_options
class TimeLimitHook(SessionRunHook):
    """Stops all workers of the model a time after the session was opened, also while they wait.

    should_stop() becomes True, every wait of asynchooks ends, and the next run ends the block; a
    step in progress is completed, so the block may end a step's time later. The time runs from
    `begin`, on the engine's clock (real or simulated), and goes on while a lost session is
    recreated: if it is up by then, the new session stops at once. It does not end the creation of
    a session, nor the pauses of a `Recovery`. Give the hook to one session at a time.

    Args:
        secs: seconds that training may take, > 0.

    Raises:
        TypeError: `secs` is not a number.
        ValueError: `secs` is not above 0, or not finite.

    Example:
        async with MonitoredSession([TimeLimitHook(0.01)], creator) as session:
            while True:
                await session.run("loss")
        print(session.stop_reason)  # TimeLimitHook: 0.01 s have passed
    """

    uses_default_graph = False
    needs_session_in_begin = False
    _shown = (("secs", "_secs"),)

    def __init__(self, secs: float) -> None:
        self._secs = _check.seconds("secs", secs)
        self._until = 0.0

    async def begin(self) -> None:
        self._until = current_engine().now() + self._secs

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self._step = session.global_step
        if current_engine().now() >= self._until:
            self._stop(coord)
        else:
            coord.start_soon(self._wait, coord, self._until, name="TimeLimitHook")

    async def _wait(self, coord: Coordinator, until: float) -> None:
        engine = current_engine()
        slot = Slot(engine, "the time limit")
        with EndsAtStop(slot, None):
            if await engine.park(slot, until) is TIMED_OUT:
                self._stop(coord)

    def _stop(self, coord: Coordinator) -> None:
        reason = StopReason("TimeLimitHook", f"{self._secs:g} s have passed")
        extra = fields(self, step=self._step.last_known, reason=reason.why)
        logger.info("Stop requested, by %s", reason, extra=extra)
        coord.request_stop(reason=reason, all_workers=True)
