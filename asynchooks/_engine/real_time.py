"""Real time: the engines of asyncio and trio, and how their busy tasks share the event loop."""

from __future__ import annotations

import gc
import logging
import math
import signal
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import anyio
import anyio.lowlevel

from .base import TIMED_OUT, Engine, EngineTask, ShieldedScope, Slot

if TYPE_CHECKING:
    import asyncio

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

    def __init__(self) -> None:
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
        if not self._is_scheduled:  # else `_deliver` has not begun, and clears this first
            self._is_scheduled = True
            self._schedule()

    async def park(self, slot: Slot, until: float = math.inf) -> Any:
        if not slot.is_woken:
            try:
                await self._suspend(slot, until)
            finally:
                slot.waiter = None
                if slot in self._resuming:
                    self._resuming.remove(slot)
                    self._find_due()
        return slot.value

    def start(self, fn: Callable[..., Awaitable[None]], *args: Any) -> EngineTask:
        task = _RealTimeTask(self)
        self._spawn(task.run, fn, args)
        task.may_run = True
        return task

    def shielded(self, seconds: float) -> AbstractContextManager[ShieldedScope]:
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
            await self._checkpoint()
            if seen == self._pass:  # the first to come back: a new pass over the ready tasks begins
                self._pass += 1
                num, self._yields = self._yields, 0
                self._share = max(PASS_SECS / num, min(WORTH_SECS, LONGEST_PASS_SECS / num))
            self._resumed_at = self.tick()
        self._find_due()

    async def checkpoint(self) -> None:
        await self._checkpoint()

    def _find_due(self) -> None:
        """Find when the next turn is due; at once, if a task was woken, also by another thread."""
        self.turn_due_at = self._resumed_at + self._share
        if self._resuming or self._thread_wakes:  # looked at last: a thread may be writing just now
            self.turn_due_at = -math.inf

    def _wake_here(self, slot: Slot, value: Any) -> None:
        if slot.is_woken:
            return
        slot.is_woken = True
        slot.value = value
        if slot.waiter is not None:
            self._resuming.add(slot)
            self.turn_due_at = -math.inf
            self._resume(slot.waiter)

    def _deliver(self) -> None:
        self._is_scheduled = False
        while self._thread_wakes:
            self._wake_here(*self._thread_wakes.popleft())

    def _drop_wakes(self) -> None:
        self._is_scheduled = False
        self._thread_wakes.clear()

    @abstractmethod
    def _schedule(self) -> None:
        """Have the event loop call `_deliver` soon; drop the wakes if the loop is closed."""

    @abstractmethod
    def _suspend(self, slot: Slot, until: float) -> Awaitable[Any]:
        """Set `slot.waiter`; awaiting this suspends until it is resumed or the time has come."""

    @abstractmethod
    def _checkpoint(self) -> Awaitable[Any]:
        """Let all that are ready run once."""

    @abstractmethod
    def _resume(self, waiter: Any) -> None: ...

    @abstractmethod
    def _spawn(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None: ...


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


class AsyncioEngine(RealTimeEngine):
    """Real time on asyncio (or uvloop), with bare futures: a thread may wake them."""

    def __init__(self) -> None:
        import asyncio

        super().__init__()
        self._sleep = asyncio.sleep
        self._all_tasks = asyncio.all_tasks
        self.current_task: Any = asyncio.current_task
        self._cancelled_error = asyncio.CancelledError
        loop = asyncio.get_running_loop()
        # `get_running_loop` would ask the system for the process each time, on Python 3.11
        self._loop: Callable[[], Any] = ref(loop)
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds weak references only
        # asyncio's own clock, read without asking the loop; uvloop's ticks in milliseconds and
        # stands still within a callback
        own = asyncio.BaseEventLoop
        has_clock = isinstance(loop, own) and type(loop).time is not own.time
        self.now = partial(_time_of, self._loop) if has_clock else time.monotonic

    def is_running(self, task: object) -> bool:
        # to ask for the task of a given loop takes a third of the time on Python 3.11
        return threading.get_ident() == self._thread and self.current_task(self._loop()) is task

    def _is_cancellation(self, error: BaseException) -> bool:
        if not isinstance(error, self._cancelled_error):
            return False
        task: Any = self.current_task()  # else what it awaits was cancelled, and said so
        return task is None or task.cancelling() > 0

    def cancellation_probe(self) -> Callable[[BaseException], bool]:
        return is_of_task_on_asyncio

    def wake_on_signals(self) -> Callable[[], None]:
        return wake_on_signals(self._loop())

    def expect_exit(self, error: BaseException) -> BaseException:
        # asyncio's loop is left by an exit at once, so that none asks the tasks it has passed
        # through for their errors; each task would be reported when it is freed
        loop = self._loop()
        report = loop.get_exception_handler()

        def handle(loop: Any, context: dict[str, Any]) -> None:
            found = context.get("exception")
            if isinstance(found, BaseExceptionGroup):
                found = error if found.split(lambda each: each is error)[1] is None else found
            if found is error:
                return
            if report is None:
                loop.default_exception_handler(context)
            else:
                report(loop, context)

        loop.set_exception_handler(handle)
        return error

    def running_tasks(self) -> list[tuple[str, object]]:
        # not anyio.get_running_tasks, which works in the event loop's own thread only
        loop = self._loop()
        tasks = set() if loop is None else self._all_tasks(loop)
        named = [(task.get_name(), task.get_coro()) for task in tasks]
        return sorted(named, key=lambda each: (len(each[0]), each[0]))  # "Task-9", "Task-10"

    def is_alone(self) -> bool:
        return len(self._all_tasks(self._loop())) == 1

    def _suspend(self, slot: Slot, until: float) -> Awaitable[Any]:
        waiter: Awaitable[Any] = self._loop().create_future()
        slot.waiter = waiter
        return waiter if until == math.inf else self._suspend_until(slot, until)

    async def _suspend_until(self, slot: Slot, until: float) -> None:
        call_later = self._loop().call_later
        timer: asyncio.TimerHandle | None = None

        def expire() -> None:
            nonlocal timer
            left = until - self.now()
            if timer is None or left > 0:  # uvloop's timers count whole milliseconds, rounded
                timer = call_later(max(0.0, left), expire)
            else:
                self._wake_here(slot, TIMED_OUT)

        expire()
        try:
            await slot.waiter
        finally:
            timer.cancel()  # type: ignore[union-attr]

    def _checkpoint(self) -> Awaitable[Any]:
        return self._sleep(0)

    def _resume(self, waiter: Any) -> None:
        if not waiter.done():
            waiter.set_result(None)

    def _schedule(self) -> None:
        loop = self._loop()
        try:
            if loop is None:
                self._drop_wakes()
            else:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: no task is left to be woken
            self._drop_wakes()

    def _spawn(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        task: Any = self._loop().create_task(fn(*args))
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: Any) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # an exit, which has ended the loop: asyncio need not report it, too


class TrioEngine(RealTimeEngine):
    """Real time on trio."""

    def __init__(self) -> None:
        import trio

        super().__init__()
        self._trio = trio
        self._cancelled = trio.Cancelled
        self.current_task = trio.lowlevel.current_task  # type: ignore[method-assign]
        self._reschedule = trio.lowlevel.reschedule
        self._wait = trio.lowlevel.wait_task_rescheduled
        succeeded = trio.lowlevel.Abort.SUCCEEDED

        def abort(slot: Slot, _: object) -> Any:
            slot.waiter = None
            return succeeded

        self._abort = abort  # bound to each slot: one object less to collect than a closure is
        root = trio.lowlevel.current_root_task()
        assert root is not None
        self._root = ref(root)
        self._token = ref(trio.lowlevel.current_trio_token())
        self.now = trio.lowlevel.current_clock().current_time

    def _is_cancellation(self, error: BaseException) -> bool:
        return isinstance(error, self._cancelled)

    def cancellation_probe(self) -> Callable[[BaseException], bool]:
        return probe_on_trio(self._trio)

    def _suspend(self, slot: Slot, until: float) -> Awaitable[Any]:
        slot.waiter = self.current_task()
        waiter: Awaitable[Any] = self._wait(MethodType(self._abort, slot))
        return waiter if until == math.inf else self._suspend_until(slot, until, waiter)

    async def _suspend_until(self, slot: Slot, until: float, waiter: Awaitable[Any]) -> None:
        with self._trio.CancelScope(deadline=until) as scope:
            await waiter
        if scope.cancelled_caught:
            self._wake_here(slot, TIMED_OUT)

    def running_tasks(self) -> list[tuple[str, object]]:
        # not anyio.get_running_tasks, which works in the event loop's own thread only
        root = self._root()
        tasks = [] if root is None else [root]
        for task in tasks:  # grows meanwhile
            for nursery in task.child_nurseries:
                tasks.extend(nursery.child_tasks)
        return [(task.name, task.coro) for task in tasks]

    def is_alone(self) -> bool:
        # trio itself has two: one is the parent of all, one calls what threads hand to the loop
        return bool(self._trio.lowlevel.current_statistics().tasks_living == 3)

    def _checkpoint(self) -> Awaitable[Any]:
        return self._trio.lowlevel.checkpoint()

    def _resume(self, waiter: Any) -> None:
        self._reschedule(waiter)

    def _schedule(self) -> None:
        token = self._token()
        try:
            if token is None:
                self._drop_wakes()
            else:
                token.run_sync_soon(self._deliver)
        except self._trio.RunFinishedError:
            self._drop_wakes()

    def _spawn(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        from contextvars import copy_context

        self._trio.lowlevel.spawn_system_task(fn, *args, context=copy_context())


def is_of_task_on_asyncio(error: BaseException) -> bool:
    """As `Engine.cancellation_probe` is called."""
    return TASK_CANCELLED in str(error)


def probe_on_trio(trio: Any) -> Callable[[BaseException], bool]:
    """As `Engine.cancellation_probe`.

    Trio's checkpoints have scopes of their own, which are cancelled as they are entered: the reason
    of a cancellation is theirs. So this looks whether a scope in between shields.
    """
    # scopes are not public in trio; without this, every cancellation counts
    task = trio.lowlevel.current_task()
    outermost = getattr(task, "_cancel_status", None)

    def is_of_task(error: BaseException) -> bool:
        if not isinstance(error, trio.Cancelled):
            return False
        status = getattr(task, "_cancel_status", None)
        while status is not None and status is not outermost:
            if status._scope.shield:
                return False
            status = status.parent
        return True

    return is_of_task


def _time_of(get_loop: Callable[[], Any]) -> float:
    loop = get_loop()
    return time.monotonic() if loop is None else float(loop.time())


def new_engine() -> Engine:
    """The engine of the event loop that runs in this thread."""
    import asyncio

    loop = anyio.lowlevel.current_token().native_token
    return AsyncioEngine() if isinstance(loop, asyncio.AbstractEventLoop) else TrioEngine()


def wake_on_signals(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Let Python's signals wake the loop, unless they wake one already; returns what ends that.

    Only in the main thread. A loop that cannot watch a socket (Windows' proactor, which looks at
    signals by itself) is left alone.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    def stop() -> None:
        with suppress(NotImplementedError, RuntimeError):  # RuntimeError: the loop is closed
            loop.remove_reader(ours)
        current = signal.set_wakeup_fd(-1)
        if current != theirs.fileno():  # replaced meanwhile
            signal.set_wakeup_fd(current)
        ours.close()
        theirs.close()

    try:
        loop.add_reader(ours, ours.recv, 4096)
    except NotImplementedError:
        stop()
        return lambda: None
    found = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    if found != -1:  # uvloop, or asyncio after add_signal_handler
        signal.set_wakeup_fd(found)
        stop()
        return lambda: None
    return stop


class OldObjects:
    """Leaves out of garbage collections the objects from before training, while it goes on.

    A full collection looks at every object of the modules, 170 ms with TensorFlow, in which no task
    of the process runs. What is not part of a cycle is freed as ever.
    """

    # of the process, as garbage collection is
    _num_callers: ClassVar[int] = 0
    _is_ours: ClassVar[bool] = False
    _guard = threading.Lock()

    @classmethod
    def leave_out(cls) -> None:
        """From now on, unless the program has frozen objects itself; costs nothing."""
        with cls._guard:
            cls._num_callers += 1
            if cls._num_callers == 1 and gc.get_freeze_count() == 0:
                gc.freeze()
                cls._is_ours = True

    @classmethod
    def take_back(cls) -> None:
        """Once for each `leave_out`; after the last one, collections look at all objects again."""
        with cls._guard:
            cls._num_callers -= 1
            if cls._num_callers == 0 and cls._is_ours:
                gc.unfreeze()
                cls._is_ours = False
