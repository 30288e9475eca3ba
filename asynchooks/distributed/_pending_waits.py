"""The waits of one process's workers at a parameter server elsewhere, on this side.

Nothing here asks: the link does, and says what came.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from .._engine import STOPPED, Engine, Slot
from .._errors import StopTraining
from .._stop import EndsAtStop, Loss, Stop
from ..protocols import Snapshot
from ._messages import Ending, News


class PendingWait:
    """A wait that was asked for; its end may come before the answer that says that it is late."""

    __slots__ = ("number", "slot")

    def __init__(self, number: int, slot: Slot) -> None:
        self.number = number
        self.slot = slot


class PendingWaits:
    """Those that have not ended; a `Link` makes it.

    Args:
        loss: ends them all.
        look_again: is called when one was released; from any thread.
    """

    def __init__(self, engine: Engine, loss: Loss, look_again: Callable[[], None]) -> None:
        self._engine = engine
        self._loss = loss
        self._look_again = look_again
        self._numbers = itertools.count(1)
        self._waits: dict[int, PendingWait] = {}
        self._released: list[int] = []  # from any thread
        self.received = 0
        """The number of the last ending that came."""

    @property
    def released(self) -> tuple[int, ...]:
        """Those that nobody waits for, until the server was told."""
        return tuple(self._released)

    def told(self, numbers: tuple[int, ...]) -> None:
        """The server knows that these were released."""
        for number in numbers:
            if number in self._released:
                self._released.remove(number)

    def take(self, news: News) -> None:
        """Wake those that have ended."""
        self.received = max(self.received, news.received)
        for ending in news.endings:
            wait = self._waits.get(ending.wait)
            if wait is not None:
                wait.slot.wake((ending, news.snapshot))

    def begin(self, what: str) -> PendingWait:
        wait = PendingWait(next(self._numbers), Slot(self._engine, what))
        self._waits[wait.number] = wait
        return wait

    async def end_of(self, wait: PendingWait, stop: Stop | None) -> tuple[Ending, Snapshot | None]:
        """Wait until the news say that a wait has ended.

        Raises:
            StopTraining: the stop came first.
            StepSourceLostError: the end will not come any more.
        """
        self._loss.add(wait.slot)
        try:
            with EndsAtStop(wait.slot, stop):
                value = await self._engine.park(wait.slot)
        except BaseException:
            self.release(wait)
            raise
        finally:
            self._loss.discard(wait.slot)
        if value is not STOPPED:
            result: tuple[Ending, Snapshot | None] = value
            return result
        self.release(wait)
        if self._loss.is_set:
            raise self._loss.error()
        raise StopTraining(f"a stop was requested while waiting for {wait.slot.what}")

    def forget(self, wait: PendingWait) -> None:
        """Its end has come."""
        self._waits.pop(wait.number, None)

    def release(self, wait: PendingWait) -> None:
        """Nobody waits for it any more; from any thread."""
        if self._waits.pop(wait.number, None) is not None:
            self._released.append(wait.number)
            self._look_again()
