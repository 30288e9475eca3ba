"""TimeLimitHook: ends training when its time is up."""

from __future__ import annotations

import logging
from typing import Any

from .._coordinator import Coordinator
from .._engine import TIMED_OUT, Slot, current_engine
from .._hook import SessionRunHook
from .._stop import EndsAtStop
from .._stop_reason import StopReason
from ._arguments import as_secs

logger = logging.getLogger("asynchooks")


class TimeLimitHook(SessionRunHook):
    """Asks the session to stop a time after it was opened, also while it waits for something.

    should_stop() turns True and every wait of asynchooks ends; a step that is under way is not
    cut short, so the block ends a step's time later. The time runs from `begin`, on the engine's
    clock (real or simulated), and goes on while a lost session is recreated: if it is up by then,
    the new one stops at once. It cannot end the creation of a session, nor the pauses of a
    `Recovery`.

    You make it and give it to one session at a time; nothing needs to be closed.

    Args:
        secs: seconds that training may take, > 0.

    Raises:
        TypeError: `secs` is no number.
        ValueError: `secs` is not above 0, or not finite.

    Example:
        async with MonitoredSession([TimeLimitHook(0.01)], creator) as session:
            while not session.should_stop():
                await session.run("loss")
        print(session.stop_reason)  # TimeLimitHook: 0.01 s have passed
    """

    _looks_at_default_graph = False

    def __init__(self, secs: float) -> None:
        self._secs = as_secs("secs", secs)
        self._until = 0.0

    async def begin(self) -> None:
        self._until = current_engine().now() + self._secs

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
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
        logger.info("Stop requested, by %s", reason)
        coord.request_stop(reason=reason)
