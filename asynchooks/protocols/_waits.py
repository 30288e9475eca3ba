"""The workers that wait on a parameter server, and who is told when an update comes.

It knows neither gradients nor protocols: the server says what has happened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from .._engine import STOPPED, Slot, current_engine
from .._errors import StopTraining
from .._global_step import GlobalStep
from .._stop import EndsAtStop
from .._waiters import Waiters
from ._values import ABANDONED


class Waits:
    """All wake-ups go in order of asking; at the slowest clock, of clocks and then of asking."""

    __slots__ = ("_for_slowest", "_of", "_steps", "for_next", "watchers")

    def __init__(self, step: GlobalStep, num_workers: int) -> None:
        # each as its session sees it, whose stop ends the worker's waits
        self._steps = [step] * num_workers
        self._of: dict[int, list[Slot]] = {}  # where each worker is parked
        self.for_next: dict[Slot, None] = {}  # a dict keeps the order, and forgets cheaply
        self._for_slowest = Waiters(None)
        self.watchers: dict[Slot, int] = {}  # and the version that each works on

    def attach(self, worker: int, step: GlobalStep) -> None:
        self._steps[worker] = step

    async def for_update(self, worker: int) -> None:
        """Park until the next update, or until there is something else to look at."""
        slot = Slot(current_engine(), f"an update with the gradient of worker {worker}")
        self.for_next[slot] = None
        try:
            await self._park(worker, slot)
        finally:
            self.for_next.pop(slot, None)

    async def for_slowest(self, worker: int, clock: int) -> None:
        """Park until the slowest has finished so many steps, or there is something else."""
        slot = Slot(current_engine(), f"the slowest worker's step {clock}, as worker {worker}")
        waiter = self._for_slowest.add(clock, slot, None)
        try:
            await self._park(worker, slot)
        finally:
            self._for_slowest.leave(waiter)

    async def _park(self, worker: int, slot: Slot) -> None:
        own = self._of.setdefault(worker, [])
        own.append(slot)
        try:
            with EndsAtStop(slot, self._steps[worker]._stop):
                value = await slot.engine.park(slot)
        finally:
            own.remove(slot)
        if value is STOPPED:
            raise StopTraining(f"a stop was requested while waiting for {slot.what}")

    def watch(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have `abandon` wake the slot; returns what forgets it."""
        self.watchers[slot] = version
        return lambda: self.watchers.pop(slot, None)

    def abandon(self, is_useless: Callable[[int], bool]) -> None:
        """Wake those whose version is useless now."""
        watchers = self.watchers
        useless = [slot for slot, version in watchers.items() if is_useless(version)]
        for slot in useless:
            del watchers[slot]
            slot.wake(ABANDONED)

    def tell_update(self) -> None:
        if self.for_next:
            slots, self.for_next = self.for_next, {}
            _wake(slots)

    def tell_slowest(self, clock: int) -> None:
        if self._for_slowest.next_step <= clock:
            _wake(each.slot for each in self._for_slowest.take_due(clock))

    def tell_worker(self, worker: int) -> None:
        """Have it look again."""
        _wake(list(self._of.get(worker, ())))

    def tell_all(self) -> None:
        """Have everybody look again."""
        self.tell_update()
        self.tell_slowest(sys.maxsize)


def _wake(slots: Iterable[Slot]) -> None:
    for slot in slots:
        slot.wake()
