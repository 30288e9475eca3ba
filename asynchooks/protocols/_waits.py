"""Workers that wait on a parameter server, and computations that an update makes useless."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from .._engine.base import STOPPED, Sentinel, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop
from .._errors import StopTraining
from .._step.global_step import GlobalStep
from .._stopping.tasks import run_beside

ABANDONED = Sentinel("ABANDONED")
"""What `ParameterServer.watch_update` wakes a slot with."""

Watch = Callable[[Slot], Callable[[], object]]
"""Registers a slot to be woken with `ABANDONED`; returns a function that removes it."""


class Waits:
    """Slots wake in order of registration; those for the slowest clock, by clock first."""

    __slots__ = ("_for_slowest", "_order", "_parked", "_steps", "for_next", "watchers")

    def __init__(self, step: GlobalStep, num_workers: int) -> None:
        # as seen by each worker's session, whose stop ends the worker's waits
        self._steps = [step] * num_workers
        self._parked: dict[int, list[Slot]] = {}  # by worker
        self.for_next: dict[Slot, None] = {}  # a dict keeps the order, and removes cheaply
        # by clock, then order of asking
        self._for_slowest: list[tuple[int, int, Slot]] = []
        self._order = 0
        self.watchers: dict[Slot, int] = {}  # with the version that each works on

    def attach(self, worker: int, step: GlobalStep) -> None:
        self._steps[worker] = step

    async def for_update(self, worker: int) -> None:
        """Park until the next update, or until the wait is to be checked again."""
        slot = Slot(current_engine(), f"an update with the gradient of worker {worker}")
        self.for_next[slot] = None
        try:
            await self._park(worker, slot)
        finally:
            self.for_next.pop(slot, None)

    async def for_slowest(self, worker: int, clock: int) -> None:
        """Park until the slowest has finished `clock` steps, or the wait is to be checked again."""
        slot = Slot(current_engine(), f"the slowest worker's step {clock}, as worker {worker}")
        entry = (clock, self._order, slot)
        heapq.heappush(self._for_slowest, entry)
        self._order += 1
        try:
            await self._park(worker, slot)
        finally:
            if entry in self._for_slowest:
                self._for_slowest.remove(entry)
                heapq.heapify(self._for_slowest)

    async def _park(self, worker: int, slot: Slot) -> None:
        own = self._parked.setdefault(worker, [])
        own.append(slot)
        try:
            with EndsAtStop(slot, self._steps[worker].stop):
                value = await slot.engine.park(slot)
        finally:
            own.remove(slot)
        if value is STOPPED:
            raise StopTraining(f"a stop was requested while waiting for {slot.what}")

    def watch(self, version: int, slot: Slot) -> Callable[[], object]:
        """Register a slot for `abandon`; returns a function that removes it."""
        self.watchers[slot] = version
        return lambda: self.watchers.pop(slot, None)

    def abandon(self, is_obsolete: Callable[[int], bool]) -> None:
        """Wake the watchers whose version is useless now."""
        watchers = self.watchers
        useless = [slot for slot, version in watchers.items() if is_obsolete(version)]
        for slot in useless:
            del watchers[slot]
            slot.wake(ABANDONED)

    def notify_update(self) -> None:
        if self.for_next:
            slots, self.for_next = self.for_next, {}
            _wake(slots)

    def notify_slowest(self, clock: int) -> None:
        while self._for_slowest and self._for_slowest[0][0] <= clock:
            heapq.heappop(self._for_slowest)[2].wake()

    def notify_worker(self, worker: int) -> None:
        """Let the waits of a worker check their condition again."""
        _wake(list(self._parked.get(worker, ())))

    def notify_all(self) -> None:
        """Let every wait check its condition again."""
        self.notify_update()
        self.notify_slowest(sys.maxsize)


def _wake(slots: Iterable[Slot]) -> None:
    for slot in slots:
        slot.wake()


async def compute_unless(
    watch: Watch, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
) -> tuple[bool, Any]:
    """Run `fn(*args)` to its end: (True, its value), or (False, None) if it was abandoned."""
    slot = Slot(current_engine(), f"the end of {getattr(fn, '__qualname__', fn)!r}, or an update")
    remove = watch(slot)
    try:
        outcome = None if slot.is_woken else await run_beside(slot, fn, *args)
    finally:
        remove()
    return (False, None) if outcome is None else (True, outcome.unwrap())
