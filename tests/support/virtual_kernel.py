"""Engines in virtual time, in a few lines each: proof that the engine seam is enough.

One heap of (time, order of asking) holds every wake-up; one entry fires at a time, when no task
runs. Not a simulator: no deadlock report, no threads, no foreign waits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from types import coroutine
from typing import Any

import anyio

from asynchooks._engine.base import TIMED_OUT, Engine, EngineTask, Slot
from asynchooks._engine.current import use_engine


class Cancelled(BaseException):
    """The trampoline's cancellation."""


class Kernel(Engine):
    """The heap and the clock; subclasses say how a task is suspended and resumed."""

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
                await self.suspend(slot)
            finally:
                slot.waiter = None  # a task that was cancelled is not resumed by a late wake-up
        return slot.value

    async def turn(self) -> None:
        slot = Slot(self, "a turn")
        self.at(self.time, lambda: self.wake(slot))
        await self.park(slot)

    async def suspend(self, slot: Slot) -> None:
        raise NotImplementedError

    def check_end(self, main: _Task) -> None:
        """Fail a program that stands still: nothing is left to fire, and its main waits."""
        assert main.is_done, f"the program stands still at {self.time} s: its main never ended"


class AnyioKernel(Kernel):
    """Tasks are those of asyncio or trio; the kernel fires when none of them runs."""

    def __init__(self) -> None:
        super().__init__()
        self._running = 0
        self._idle = anyio.Event()
        self._group = anyio.create_task_group()

    async def suspend(self, slot: Slot) -> None:
        event = anyio.Event()
        slot.waiter = lambda: self._resume(event.set)
        self._pause()
        await event.wait()

    def _resume(self, how: Callable[[], object]) -> None:
        self._running += 1
        how()

    def _pause(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._idle.set()

    def _is_cancellation(self, error: BaseException) -> bool:
        return isinstance(error, anyio.get_cancelled_exc_class())

    def start(self, fn: Callable[..., Awaitable[None]], *args: Any) -> _Task:
        task = _Task(self, anyio.CancelScope())
        begin = lambda: self._group.start_soon(self._run, task, fn, args)  # noqa: E731
        self.at(self.time, lambda: self._resume(begin))
        return task

    async def _run(self, task: _Task, fn: Callable[..., Awaitable[None]], args: Any) -> None:
        with task.scope:
            await fn(*args)
        task.finish()
        self._pause()

    def shielded(self, seconds: float) -> AbstractContextManager[Any]:
        return anyio.CancelScope(shield=True)

    async def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async with self._group:
            with use_engine(self):
                task = self.start(main)
                while self.fire_next():
                    while self._running:
                        self._idle = anyio.Event()
                        await self._idle.wait()
                self.check_end(task)


class Trampoline(Kernel):
    """Tasks are bare coroutines, resumed without any event loop."""

    async def suspend(self, slot: Slot) -> None:
        await _yield(slot)

    def _is_cancellation(self, error: BaseException) -> bool:
        return isinstance(error, Cancelled)

    def start(self, fn: Callable[..., Awaitable[None]], *args: Any) -> _Task:
        task = _Task(self, None)
        task.body, task.context = _as_coroutine(fn, args), copy_context()
        self.at(self.time, lambda: self.step(task))
        return task

    def step(self, task: _Task, error: BaseException | None = None) -> None:
        if task.is_done:
            return
        body = task.body
        try:
            if error is None:
                slot = task.context.run(body.send, None)
            else:
                slot = task.context.run(body.throw, error)
            slot.waiter = lambda: self.step(task)
        except (StopIteration, Cancelled):
            task.finish()

    def shielded(self, seconds: float) -> AbstractContextManager[Any]:
        return _NoScope()

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        with use_engine(self):
            task = self.start(main)
            while self.fire_next():
                pass
        self.check_end(task)


class _NoScope:
    cancelled_caught = False

    def __enter__(self) -> _NoScope:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Task(EngineTask):
    def __init__(self, kernel: Kernel, scope: Any) -> None:
        self._kernel = kernel
        self.scope = scope
        self.is_done = False
        self._waiting: list[Slot] = []
        self.body: Coroutine[Any, Any, None]
        self.context: Context

    def finish(self) -> None:
        self.is_done = True
        for slot in self._waiting:
            slot.wake()

    def cancel(self) -> None:
        if self.is_done:
            return
        kernel = self._kernel
        if isinstance(kernel, Trampoline):
            kernel.at(kernel.time, lambda: kernel.step(self, Cancelled()))
        elif isinstance(kernel, AnyioKernel):
            kernel.at(kernel.time, lambda: self._cancel_scope(kernel))

    def _cancel_scope(self, kernel: AnyioKernel) -> None:
        if not self.is_done:
            kernel._resume(self.scope.cancel)

    async def wait(self, until: float = math.inf) -> bool:
        if not self.is_done:
            slot = Slot(self._kernel, "the end of a task")
            self._waiting.append(slot)
            await self._kernel.park(slot, until)
        return self.is_done


async def _as_coroutine(fn: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
    await fn(*args)


@coroutine
def _yield(slot: Slot) -> Generator[Slot, None, None]:
    yield slot
