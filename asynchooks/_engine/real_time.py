"""Real time: the engines of asyncio and trio, and how their busy tasks share the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any
from weakref import ref

import anyio
import anyio.lowlevel

from .base import TIMED_OUT, Engine, EngineTask, Slot

logger = logging.getLogger("asynchooks")

PASS_SECS, LONGEST_PASS_SECS = 0.005, 0.01
"""How long the event loop's busy tasks may run, all together, between two looks at its timers."""
WORTH_SECS = 1.6e-4
"""A share below this would be lost on turns, at 5 to 8 us each: then a pass may be longer."""


TASK_CANCELLED = "a task of asynchooks was cancelled"
"""The reason of the scope around a task; anyio's cancellations on asyncio say it."""


class RealTimeEngine(Engine):
    """What real time on asyncio and on trio have in common.

    It lives as long as its event loop, which is the key that it is kept under: a strong reference
    to that would keep both for ever (259 KB for each loop of uvloop).
    """

    _resume: Callable[[Any], None]
    """Resume a task, given its slot's waiter."""
    _spawn: Callable[..., None]
    """Start `fn(*args)` as a task of the event loop."""

    def __init__(self, home: Any, call_soon: Callable[..., Any]) -> None:
        self._home: Callable[[], Any] = ref(home)  # the event loop, and how a thread has it call
        self._call_soon = call_soon
        self._thread = threading.get_ident()
        self._thread_wakes: deque[tuple[Slot, Any]] = deque()  # of other threads
        self._is_scheduled = False
        self._resuming: set[Slot] = set()  # parked, woken, and have not run yet
        # The tasks that share the loop's slice: those that yielded in this pass over
        # the ready ones.
        # A turn costs 5-8 us, so it is paid by elapsed time. The slice belongs to the loop: with
        # one per session, 1,000 busy sessions made a timer 15 s late.
        self._pass = 0
        self._yields = 0
        self._share = PASS_SECS
        self._resumed_at = -math.inf
        self.tick = time.monotonic  # type: ignore[method-assign]  # trio's own takes three calls
        self.stopwatch = time.monotonic  # type: ignore[method-assign]

    @property
    def is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def wake(self, slot: Slot, value: Any = None) -> None:
        if threading.get_ident() == self._thread:
            self._wake_here(slot, value)
        else:
            self.wake_from_signal(slot, value)

    def wake_from_signal(self, slot: Slot, value: Any = None) -> None:
        self._thread_wakes.append((slot, value))
        self.turn_due_at = -math.inf
        home = self._home()
        # where it is scheduled, `_deliver` has not begun, and clears this first
        if home is not None and not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the loop is closed: no task is left to be woken
                self._call_soon(home, self._deliver)

    def start(self, fn: Callable[..., Awaitable[None]], *args: Any) -> EngineTask:
        task = _RealTimeTask(self)
        self._spawn(task.run, fn, args)
        task.may_run = True
        return task

    def start_soon(self, fn: Callable[[], Awaitable[None]]) -> None:
        if (home := self._home()) is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._call_soon(home, self._spawn, fn)

    def shielded(self, seconds: float) -> AbstractContextManager[Any]:
        return anyio.move_on_after(seconds, shield=True)

    async def turn(self) -> None:
        is_due = self.tick() - self._resumed_at >= self._share
        # trio shuffles the ready tasks, so those that were woken may need a second pass
        for _ in range(2 + is_due):
            if not (is_due or self._resuming or self._thread_wakes):
                break
            is_due = False
            seen = self._pass
            self._yields += 1
            await self.checkpoint()
            if seen == self._pass:  # the first to come back: a new pass over the ready tasks begins
                self._pass += 1
                num, self._yields = self._yields, 0
                self._share = max(PASS_SECS / num, min(WORTH_SECS, LONGEST_PASS_SECS / num))
            self._resumed_at = self.tick()
        self._find_due()

    def _find_due(self) -> None:
        """Find when the next turn is due; at once, if a task was woken, also by another thread."""
        self.turn_due_at = self._resumed_at + self._share
        if self._resuming or self._thread_wakes:  # looked at last: a thread may be writing just now
            self.turn_due_at = -math.inf

    def _wake_here(self, slot: Slot, value: Any) -> None:
        if not slot.is_woken:
            slot.is_woken, slot.value = True, value
            self._resume_parked(slot)

    def _resume_parked(self, slot: Slot) -> None:
        if slot.waiter is not None:
            self._resuming.add(slot)
            self.turn_due_at = -math.inf
            self._resume(slot.waiter)

    def _has_resumed(self, slot: Slot) -> None:
        slot.waiter = None
        if slot in self._resuming:
            self._resuming.remove(slot)
            self._find_due()

    def _deliver(self) -> None:
        self._is_scheduled = False
        while self._thread_wakes:
            self._wake_here(*self._thread_wakes.popleft())


class _RealTimeTask(EngineTask):
    def __init__(self, engine: RealTimeEngine) -> None:
        self._engine = engine
        self.may_run = False  # its start has returned
        self._scope = anyio.CancelScope()
        self._is_done = False
        self._waiting: list[Slot] = []

    async def run(self, fn: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        try:
            if not self.may_run:  # the loop starts its tasks at once: asyncio.eager_task_factory
                await self._engine.checkpoint()
            with self._scope:
                try:
                    await fn(*args)
                except (KeyboardInterrupt, SystemExit):  # a signal handler's, at any instruction
                    raise
                except BaseException as error:
                    failure = self._engine.failure_in(error)
                    if failure is None:
                        raise
                    # a bug; leaving this task, it would end all of trio's event loop
                    logger.error("A task of asynchooks has failed", exc_info=failure)
        finally:
            self._is_done = True
            for slot in self._waiting:
                slot.wake()

    def cancel(self) -> None:
        self._scope.cancel(TASK_CANCELLED)

    async def wait(self, until: float = math.inf) -> bool:
        if not self._is_done:
            slot = Slot(self._engine, "the end of a task")
            self._waiting.append(slot)
            await self._engine.park(slot, until)
        return self._is_done


class OnAsyncio(Engine):
    """What engines on asyncio have in common, also that of a simulation."""

    current_task: Any = staticmethod(asyncio.current_task)

    def _is_cancellation(self, error: BaseException) -> bool:
        if not isinstance(error, asyncio.CancelledError):
            return False
        task: Any = self.current_task()  # else what it awaits was cancelled, and said so
        return task is None or task.cancelling() > 0

    def cancellation_probe(self) -> Callable[[BaseException], bool]:
        return lambda error: TASK_CANCELLED in str(error)


class AsyncioEngine(OnAsyncio, RealTimeEngine):
    """Real time on asyncio (or uvloop), with bare futures: a thread may wake them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(loop, type(loop).call_soon_threadsafe)
        self.checkpoint = partial(asyncio.sleep, 0)  # type: ignore[method-assign]
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds weak references only
        # asyncio's own clock, read without asking the loop; uvloop's ticks in milliseconds and
        # stands still within a callback
        self.now = time.monotonic
        own = asyncio.BaseEventLoop
        if isinstance(loop, own) and type(loop).time is not own.time:
            self.now = lambda: float(self._home().time())

    @property
    def event_loop(self) -> Any:
        # `get_running_loop` would ask the system for the process each time, on Python 3.11
        return self._home()

    def running_tasks(self) -> list[tuple[str, object]]:
        # not anyio.get_running_tasks, which works in the event loop's own thread only
        named = [(task.get_name(), task.get_coro()) for task in asyncio.all_tasks(self._home())]
        return sorted(named, key=lambda each: (len(each[0]), each[0]))  # "Task-9", "Task-10"

    def is_alone(self) -> bool:
        return len(asyncio.all_tasks(self._home())) == 1

    async def park(self, slot: Slot, until: float = math.inf) -> Any:
        while not slot.is_woken:  # again where a timer was early: uvloop's count milliseconds
            loop, timer = self._home(), None
            slot.waiter = waiter = loop.create_future()
            if until < math.inf:
                delay = max(0.0, until - self.now())
                timer = loop.call_later(delay, self._resume_parked, slot)
            try:
                await waiter
            finally:
                self._has_resumed(slot)
                if timer is not None:
                    timer.cancel()
            if self.now() >= until:
                self._wake_here(slot, TIMED_OUT)
        return slot.value

    def _resume(self, waiter: Any) -> None:
        if not waiter.done():
            waiter.set_result(None)

    def _spawn(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        task: Any = self._home().create_task(fn(*args))
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: Any) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # an exit, which has ended the loop: asyncio need not report it, too


class OnTrio(Engine):
    """What engines on trio have in common, also that of a simulation."""

    def _is_cancellation(self, error: BaseException) -> bool:
        import trio

        return isinstance(error, trio.Cancelled)

    def cancellation_probe(self) -> Callable[[BaseException], bool]:
        # Trio's checkpoints have scopes of their own, which are cancelled as they are entered: the
        # reason of a cancellation is theirs. So this looks whether a scope in between shields.
        # Scopes are not public in trio; without this, every cancellation counts.
        task: Any = self.current_task()
        outermost = getattr(task, "_cancel_status", None)

        def is_of_task(error: BaseException) -> bool:
            if not self._is_cancellation(error):
                return False
            status = getattr(task, "_cancel_status", None)
            while status is not None and status is not outermost:
                if status._scope.shield:
                    return False
                status = status.parent
            return True

        return is_of_task


class TrioEngine(OnTrio, RealTimeEngine):
    """Real time on trio."""

    def __init__(self) -> None:
        import trio

        lowlevel = trio.lowlevel
        super().__init__(lowlevel.current_trio_token(), lowlevel.TrioToken.run_sync_soon)
        self._trio = trio
        self.checkpoint = lowlevel.checkpoint  # type: ignore[method-assign]
        self.current_task = lowlevel.current_task  # type: ignore[method-assign]
        self._resume = lowlevel.reschedule
        self._wait = lowlevel.wait_task_rescheduled
        self._aborted = lowlevel.Abort.SUCCEEDED
        self._root: Callable[[], Any] = ref(lowlevel.current_root_task())
        self.now = lowlevel.current_clock().current_time

    async def park(self, slot: Slot, until: float = math.inf) -> Any:
        if not slot.is_woken:

            def abort(_: object) -> Any:
                slot.waiter = None
                return self._aborted

            slot.waiter = self.current_task()
            try:
                if until == math.inf:
                    await self._wait(abort)
                else:
                    with self._trio.CancelScope(deadline=until) as scope:
                        await self._wait(abort)
                    if scope.cancelled_caught:
                        self._wake_here(slot, TIMED_OUT)
            finally:
                self._has_resumed(slot)
        return slot.value

    def running_tasks(self) -> list[tuple[str, object]]:
        # not anyio.get_running_tasks, which works in the event loop's own thread only
        tasks = [self._root()]
        for task in tasks:  # grows meanwhile
            for nursery in task.child_nurseries:
                tasks.extend(nursery.child_tasks)
        return [(task.name, task.coro) for task in tasks]

    def is_alone(self) -> bool:
        # trio itself has two: one is the parent of all, one calls what threads hand to the loop
        return bool(self._trio.lowlevel.current_statistics().tasks_living == 3)

    def _spawn(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        from contextvars import copy_context

        self._trio.lowlevel.spawn_system_task(fn, *args, context=copy_context())


def new_engine() -> Engine:
    """The engine of the event loop that runs in this thread."""
    loop = anyio.lowlevel.current_token().native_token
    return AsyncioEngine() if isinstance(loop, asyncio.AbstractEventLoop) else TrioEngine()
