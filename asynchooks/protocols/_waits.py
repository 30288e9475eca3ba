"""Workers that wait on a parameter server, and computations that an update makes useless."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
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

    __slots__ = ("_for_slowest", "_for_update", "_steps", "watchers")

    def __init__(self, step: GlobalStep, num_workers: int) -> None:
        # as seen by each worker's session, whose stop ends the worker's waits
        self._steps = [step] * num_workers
        # with the worker of each; a dict keeps the order, and removes cheaply
        self._for_update: dict[Slot, int] = {}
        self._for_slowest: dict[int, dict[Slot, int]] = {}  # by clock
        self.watchers: dict[Slot, int] = {}  # with the version that each works on

    def attach(self, worker: int, step: GlobalStep) -> None:
        self._steps[worker] = step

    def for_update(self, worker: int) -> Awaitable[None]:
        """Park until the next update, or until the wait is to be checked again."""
        what = f"an update with the gradient of worker {worker}"
        return self._park(worker, self._for_update, what)

    def for_slowest(self, worker: int, clock: int) -> Awaitable[None]:
        """Park until the slowest has finished `clock` steps, or the wait is to be checked again."""
        what = f"the slowest worker's step {clock}, as worker {worker}"
        return self._park(worker, self._for_slowest.setdefault(clock, {}), what)

    async def _park(self, worker: int, group: dict[Slot, int], what: str) -> None:
        slot = Slot(current_engine(), what)
        group[slot] = worker
        try:
            with EndsAtStop(slot, self._steps[worker].stop):
                value = await slot.engine.park(slot)
        finally:
            group.pop(slot, None)
        if value is STOPPED:
            raise StopTraining(f"a stop was requested while waiting for {what}")

    def watch(self, version: int, slot: Slot) -> Callable[[], object]:
        """Register a slot for `abandon`; returns a function that removes it."""
        self.watchers[slot] = version
        return partial(self.watchers.pop, slot, None)

    def abandon(self, is_obsolete: Callable[[int], bool]) -> None:
        """Wake the watchers whose version is useless now."""
        for slot in [each for each, on in self.watchers.items() if is_obsolete(on)]:
            del self.watchers[slot]
            slot.wake(ABANDONED)

    def notify_update(self) -> None:
        _wake(self._for_update)

    def notify_slowest(self, clock: float) -> None:
        for each in sorted(self._for_slowest):
            if each > clock:
                break
            _wake(self._for_slowest.pop(each))

    def notify_worker(self, worker: int) -> None:
        """Let the waits of a worker check their condition again."""
        for group in (self._for_update, *self._for_slowest.values()):
            for slot in [each for each, waiting in group.items() if waiting == worker]:
                slot.wake()

    def notify_all(self) -> None:
        """Let every wait check its condition again."""
        self.notify_update()
        self.notify_slowest(math.inf)


def _wake(group: dict[Slot, int]) -> None:
    slots = list(group)
    group.clear()  # none is woken twice, where a thousand workers leave one after the other
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
