"""A first-come-first-served lock for tasks of one event loop, waiting through the engine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from types import TracebackType

from .base import Slot
from .current import current_engine


class Lock:
    """`async with lock:` lets one task in at a time, in order of asking. Cancellation safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_held = False
        self._queue: deque[Slot] = deque()

    async def __aenter__(self) -> None:
        if not self.enter_now():
            await self.wait()

    def enter_now(self) -> bool:
        """Come in, if nobody is there; whoever does calls `leave`."""
        if self._is_held:
            return False
        self._is_held = True
        return True

    async def wait(self) -> None:
        """Come in when it is one's turn, after somebody else."""
        engine = current_engine()
        slot = Slot(engine, self._what)
        self._queue.append(slot)
        try:
            await engine.park(slot)
        except BaseException:
            if slot.is_woken:  # the lock came together with the cancellation: pass it on
                self.leave()
            else:
                self._queue.remove(slot)
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        if self._queue:
            self._queue.popleft().wake()
        else:
            self._is_held = False


class Condition:
    """Tasks that wait for another task's run or close to end."""

    __slots__ = ("slots",)

    def __init__(self) -> None:
        self.slots: tuple[Slot, ...] = ()

    async def wait_until(
        self, is_done: Callable[[], bool], what: str, until: float = math.inf
    ) -> None:
        """Return when it is done, or the time has come on the engine's clock."""
        engine = current_engine()
        while not is_done() and engine.now() < until:
            slot = Slot(engine, what)
            self.slots += (slot,)
            await engine.park(slot, until)

    def tell(self) -> None:
        """Have them all look again."""
        slots, self.slots = self.slots, ()
        for slot in slots:
            slot.wake()
