"""A first-come-first-served lock for tasks of one event loop, waiting through the engine."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from ._engine import Slot, current_engine


class Lock:
    """`async with lock:` lets one task in at a time, in order of asking. Cancellation safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_held = False
        self._queue: deque[Slot] = deque()

    async def __aenter__(self) -> None:
        if not self._is_held:
            self._is_held = True
            return
        engine = current_engine()
        slot = Slot(engine, self._what)
        self._queue.append(slot)
        try:
            await engine.park(slot)
        except BaseException:
            if slot.is_woken:  # the lock came together with the cancellation: pass it on
                self._pass_on()
            else:
                self._queue.remove(slot)
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        if self._queue:
            self._queue.popleft().wake()
        else:
            self._is_held = False
