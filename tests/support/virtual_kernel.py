"""An engine in virtual time, without any event loop: proof that the engine seam is enough.

One heap of (time, order of asking) holds every wake-up; one entry fires at a time, when no task
runs. Not a simulator: no deadlock report, no threads, no foreign waits.

The seam is private, as nobody else writes engines.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from types import SimpleNamespace, coroutine
from typing import Any

from asynchooks._engine.base import TIMED_OUT, Engine, EngineTask, Slot
from asynchooks._engine.current import use_engine


class Cancelled(BaseException):
    """The cancellation of a task."""


class Trampoline(Engine):
    """The heap and the clock. Tasks are bare coroutines."""

    is_virtual = True

    def __init__(self) -> None:
        self.time = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0

    def now(self) -> float:
        return self.time

    def at(self, time: float, fire: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (time, self._order, fire))
        self._order += 1

    def fire_next(self) -> bool:
        if not self._heap:
            return False
        self.time, _, fire = heapq.heappop(self._heap)
        fire()
        return True

    def wake(self, slot: Slot, value: Any = None) -> None:
        if not slot.is_woken:
            slot.is_woken, slot.value = True, value
            if slot.waiter is not None:
                self.at(self.time, lambda: slot.waiter and slot.waiter())

    async def park(self, slot: Slot, until: float = math.inf) -> Any:
        if until < math.inf:
            self.at(max(until, self.time), lambda: self.wake(slot, TIMED_OUT))
        if not slot.is_woken:
            try:
                await _suspend(slot)
            finally:
                slot.waiter = None  # a task that was cancelled is not resumed by a late wake-up
        return slot.value

    async def turn(self) -> None:
        slot = Slot(self, "a turn")
        self.at(self.time, lambda: self.wake(slot))
        await self.park(slot)

    def _is_cancellation(self, error: BaseException) -> bool:
        return isinstance(error, Cancelled)

    def start(self, fn: Callable[..., Awaitable[None]], *args: Any) -> _Task:
        task = _Task(self, _as_coroutine(fn, args))
        self.at(self.time, task.step)
        return task

    def shielded(self, seconds: float) -> AbstractContextManager[Any]:
        return nullcontext(SimpleNamespace(cancelled_caught=False))

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        with use_engine(self):
            task = self.start(main)
            while self.fire_next():
                pass
        assert task.is_done, f"the program stands still at {self.time} s: its main never ended"


class _Task(EngineTask):
    def __init__(self, kernel: Trampoline, body: Coroutine[Any, Any, None]) -> None:
        self._kernel, self.body, self._context = kernel, body, copy_context()
        self.is_done = False
        self._waiting: list[Slot] = []

    def step(self, error: BaseException | None = None) -> None:
        """Go on until the next wait, or with an error that is thrown into it."""
        if self.is_done:
            return
        try:
            if error is None:
                slot = self._context.run(self.body.send, None)
            else:
                slot = self._context.run(self.body.throw, error)
            slot.waiter = self.step
        except (StopIteration, Cancelled):
            self.is_done = True
            for slot in self._waiting:
                slot.wake()

    def cancel(self) -> None:
        self._kernel.at(self._kernel.time, lambda: self.step(Cancelled()))

    async def wait(self, until: float = math.inf) -> bool:
        if not self.is_done:
            slot = Slot(self._kernel, "the end of a task")
            self._waiting.append(slot)
            await self._kernel.park(slot, until)
        return self.is_done


async def _as_coroutine(fn: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
    await fn(*args)


@coroutine
def _suspend(slot: Slot) -> Generator[Slot, None, None]:
    yield slot
