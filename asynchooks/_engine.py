"""The engine: the one seam through which asynchooks suspends, wakes and starts tasks.

Everything above waits by `park` and is woken by `wake`; nobody reads a clock but by `now`. Real
time runs on asyncio or trio; a simulation installs an engine of its own with `use_engine` and
the rest of the package does not notice. Nothing here knows of steps, hooks or sessions.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

import anyio
import anyio.lowlevel

from ._signal import Signal

PASS_SECS, LONGEST_PASS_SECS = 0.005, 0.01
"""How long the event loop's busy tasks may run, all together, between two looks at its timers."""
WORTH_SECS = 1.6e-4
"""A share below this would be lost on turns, at 5 to 8 us each: then a pass may be longer."""


TIMED_OUT = Signal("TIMED_OUT")
"""What a slot is woken with when its deadline came first."""
STOPPED = Signal("STOPPED")
"""What a slot is woken with when a stop came first."""


class Slot:
    """One task's place to be woken, once. The first value wins.

    Args:
        engine: who parks the task here, and therefore who may wake it.
        what: what is waited for, for people ("global step 100").
    """

    __slots__ = ("engine", "is_woken", "value", "waiter", "what")

    def __init__(self, engine: Engine, what: str) -> None:
        self.engine = engine
        self.what = what
        self.is_woken = False
        self.value: Any = None
        self.waiter: Any = None  # the engine's own: what resumes the parked task

    def wake(self, value: Any = None) -> None:
        """Wake the parked task, or the next one to park here; from any thread."""
        self.engine.wake(self, value)

    def __repr__(self) -> str:
        return f"<Slot for {self.what}: {self.value if self.is_woken else 'waiting'!r}>"


class ShieldedScope(Protocol):
    """What `Engine.shielded` gives: whether its time ran out."""

    @property
    def cancelled_caught(self) -> bool: ...


class EngineTask(ABC):
    """A task started by an engine; it belongs to whoever started it."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask the task to end at its next wait; does not wait for it."""

    @abstractmethod
    async def wait(self, until: float = math.inf) -> bool:
        """Whether the task has ended by then, on `Engine.now`. Cancellation safe: it goes on."""


class Engine(ABC):
    """The one way to suspend. Methods are for the event loop's thread, but `now` and `wake`."""

    is_virtual: ClassVar[bool] = False
    """Whether time is simulated: blocking work then runs inline, so that it costs no time."""
    now: Callable[[], float]
    """Seconds on a clock that never goes back; from any thread. A method, or the clock's own."""
    turn_due_at: float = -math.inf
    """When, by `tick`, `turn` would let somebody run; a busy task need not call it before."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether it belongs to another thread, in which an event loop of its own may run."""
        return False

    def tick(self) -> float:
        """Seconds, for how long a task is busy: the cheapest clock, for differences only."""
        return self.now()

    @abstractmethod
    async def park(self, slot: Slot, until: float = math.inf) -> Any:
        """Suspend until the slot is woken and return its value; `TIMED_OUT` at `until` (on `now`).

        A slot that is woken already returns at once. Cancellation safe: when cancelled, the
        caller looks at `slot.is_woken` to see whether a value was lost.
        """

    @abstractmethod
    def wake(self, slot: Slot, value: Any = None) -> None:
        """Give the slot its value, unless it has one; from any thread, never blocking."""

    @abstractmethod
    def start(self, fn: Callable[..., Awaitable[None]], *args: Any) -> EngineTask:
        """Start `fn(*args)` as a task of its own. It must not raise: nobody could catch it."""

    @abstractmethod
    def shielded(self, seconds: float) -> AbstractContextManager[ShieldedScope]:
        """A scope that cancellation does not enter, for that many seconds at most."""

    @abstractmethod
    async def turn(self) -> None:
        """Let others run: whoever was woken always, all others when their share is due."""

    def is_being_cancelled(self) -> bool:
        """Whether a cancellation that the running task just caught was meant for it."""
        return True


class RealTimeEngine(Engine):
    """What real time on asyncio and on trio have in common."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._mail: deque[tuple[Slot, Any]] = deque()  # wakes of other threads
        self._is_rung = False
        self._resuming: set[Slot] = set()  # parked, woken, and have not run yet
        # Who shares the loop's slice: yields in this pass over the ready tasks, and the last's.
        # A turn costs 5-8 us, so it is paid by elapsed time. The slice belongs to the loop: with
        # one per session, 1,000 busy sessions made a timer 15 s late.
        self._pass = 0
        self._yields = 0
        self._share = PASS_SECS
        self._resumed_at = -math.inf
        self.tick = time.monotonic  # type: ignore[method-assign]  # trio's own takes three calls

    @property
    def is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def wake(self, slot: Slot, value: Any = None) -> None:
        if threading.get_ident() == self._thread:
            self._wake_here(slot, value)
        else:
            self._mail.append((slot, value))
            self.turn_due_at = -math.inf
            if not self._is_rung:  # else the loop is on its way to look, and clears this first
                self._is_rung = True
                self._ring()

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
        return task

    def shielded(self, seconds: float) -> AbstractContextManager[ShieldedScope]:
        return anyio.move_on_after(seconds, shield=True)

    async def turn(self) -> None:
        is_due = self.tick() - self._resumed_at >= self._share
        # trio shuffles the ready tasks, so those that were woken may need a second pass
        for _ in range(2 + is_due):
            if not (is_due or self._resuming or self._mail):
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

    def _find_due(self) -> None:
        """Say when the next turn is due; at once, if somebody was woken, who may be in the mail."""
        self.turn_due_at = self._resumed_at + self._share
        if self._resuming or self._mail:  # looked at last: a thread may be writing just now
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
        self._is_rung = False
        while self._mail:
            self._wake_here(*self._mail.popleft())

    def _drop_mail(self) -> None:
        self._is_rung = False
        self._mail.clear()

    @abstractmethod
    def _ring(self) -> None:
        """Have the event loop call `_deliver` soon; dropped when the loop is closed."""

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
        self._scope = anyio.CancelScope()
        self._is_done = False
        self._waiting: list[Slot] = []

    async def run(self, fn: Callable[..., Awaitable[None]], args: tuple[Any, ...]) -> None:
        try:
            with self._scope:
                await fn(*args)
        finally:
            self._is_done = True
            for slot in self._waiting:
                slot.wake()

    def cancel(self) -> None:
        self._scope.cancel()

    async def wait(self, until: float = math.inf) -> bool:
        if not self._is_done:
            slot = Slot(self._engine, "the end of a task")
            self._waiting.append(slot)
            await self._engine.park(slot, until)
        return self._is_done


class AsyncioEngine(RealTimeEngine):
    """Real time on asyncio (or uvloop), with bare futures: a thread may wake them by mail."""

    def __init__(self) -> None:
        import asyncio

        super().__init__()
        self._sleep = asyncio.sleep
        self._current_task = asyncio.current_task
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds weak references only
        # asyncio's own clock, read without asking the loop; uvloop's ticks in milliseconds and
        # stands still within a callback
        own = asyncio.BaseEventLoop
        has_clock = isinstance(self._loop, own) and type(self._loop).time is not own.time
        self.now = self._loop.time if has_clock else time.monotonic

    def is_being_cancelled(self) -> bool:
        task = self._current_task()  # else what it awaits was cancelled, and said so
        return task is None or task.cancelling() > 0

    def _suspend(self, slot: Slot, until: float) -> Awaitable[Any]:
        waiter: Awaitable[Any] = self._loop.create_future()
        slot.waiter = waiter
        return waiter if until == math.inf else self._suspend_until(slot, until)

    async def _suspend_until(self, slot: Slot, until: float) -> None:
        delay = max(0.0, until - self.now())
        timer = self._loop.call_later(delay, self._wake_here, slot, TIMED_OUT)
        try:
            await slot.waiter
        finally:
            timer.cancel()

    def _checkpoint(self) -> Awaitable[Any]:
        return self._sleep(0)

    def _resume(self, waiter: Any) -> None:
        if not waiter.done():
            waiter.set_result(None)

    def _ring(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody is left to be woken
            self._drop_mail()

    def _spawn(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        task: Any = self._loop.create_task(fn(*args))  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class TrioEngine(RealTimeEngine):
    """Real time on trio."""

    def __init__(self) -> None:
        import trio

        super().__init__()
        self._trio = trio
        self._current_task = trio.lowlevel.current_task
        self._reschedule = trio.lowlevel.reschedule
        self._wait = trio.lowlevel.wait_task_rescheduled
        self._succeeded = trio.lowlevel.Abort.SUCCEEDED
        self._token = trio.lowlevel.current_trio_token()
        self.now = trio.lowlevel.current_clock().current_time

    def _suspend(self, slot: Slot, until: float) -> Awaitable[Any]:
        slot.waiter = self._current_task()

        def abort(_: object) -> Any:
            slot.waiter = None
            return self._succeeded

        waiter: Awaitable[Any] = self._wait(abort)
        return waiter if until == math.inf else self._suspend_until(slot, until, waiter)

    async def _suspend_until(self, slot: Slot, until: float, waiter: Awaitable[Any]) -> None:
        with self._trio.CancelScope(deadline=until) as scope:
            await waiter
        if scope.cancelled_caught:
            self._wake_here(slot, TIMED_OUT)

    def _checkpoint(self) -> Awaitable[Any]:
        return self._trio.lowlevel.checkpoint()

    def _resume(self, waiter: Any) -> None:
        self._reschedule(waiter)

    def _ring(self) -> None:
        try:
            self._token.run_sync_soon(self._deliver)
        except self._trio.RunFinishedError:
            self._drop_mail()

    def _spawn(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        from contextvars import copy_context

        self._trio.lowlevel.spawn_system_task(fn, *args, context=copy_context())


engine_in_use: ContextVar[Engine | None] = ContextVar("asynchooks_engine", default=None)
_real_time: anyio.lowlevel.RunVar[Engine] = anyio.lowlevel.RunVar("asynchooks_engine")


def current_engine() -> Engine:
    """The engine of the running task: the one installed, else real time on its event loop."""
    installed = engine_in_use.get()
    if installed is not None and not installed.is_elsewhere:
        return installed
    try:
        engine = _real_time.get(None)
    except RuntimeError:  # no event loop runs in this thread
        if installed is not None:
            return installed
        raise
    if engine is None:
        import asyncio

        loop = anyio.lowlevel.current_token().native_token
        engine = AsyncioEngine() if isinstance(loop, asyncio.AbstractEventLoop) else TrioEngine()
        _real_time.set(engine)
    return engine


@contextmanager
def use_engine(engine: Engine) -> Iterator[None]:
    """Within the block, and in tasks and threads started there, wait through this engine."""
    token = engine_in_use.set(engine)
    try:
        yield
    finally:
        engine_in_use.reset(token)


def now() -> float:
    """Seconds on the current engine's clock; on the system's where no engine is running."""
    try:
        return current_engine().now()
    except RuntimeError:
        return time.monotonic()
