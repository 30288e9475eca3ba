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

SLICE_SECS = 0.005
"""How long the event loop's busy tasks may run, all together, between two looks at its timers."""


class Signal:
    """A value that is told apart by identity alone, with a readable name."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


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

    @property
    def is_elsewhere(self) -> bool:
        """Whether it belongs to another thread, in which an event loop of its own may run."""
        return False

    @abstractmethod
    def now(self) -> float:
        """Seconds on a clock that never goes back; from any thread."""

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


class RealTimeEngine(Engine):
    """What real time on asyncio and on trio have in common."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        # wakes of other threads, delivered by `_deliver`
        self._mail: deque[tuple[Slot, Any]] = deque()
        # parked tasks that were woken and have not run yet
        self._resuming: set[Slot] = set()
        # who shares the loop's slice: yields in this pass over the ready tasks, and the last's
        self._pass = 0
        self._yields = 0
        self._share = SLICE_SECS
        self._resumed_at = -math.inf

    @property
    def is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def wake(self, slot: Slot, value: Any = None) -> None:
        if threading.get_ident() == self._thread:
            self._wake_here(slot, value)
        else:
            self._mail.append((slot, value))
            self._ring()

    async def park(self, slot: Slot, until: float = math.inf) -> Any:
        if not slot.is_woken:
            try:
                await self._suspend(slot, until)
            finally:
                slot.waiter = None
                self._resuming.discard(slot)
        return slot.value

    def start(self, fn: Callable[..., Awaitable[None]], *args: Any) -> EngineTask:
        task = _RealTimeTask(self)
        self._spawn(task.run, fn, args)
        return task

    def shielded(self, seconds: float) -> AbstractContextManager[ShieldedScope]:
        return anyio.move_on_after(seconds, shield=True)

    async def turn(self) -> None:
        # A turn costs 5-8 us, so it is paid by elapsed time. The slice belongs to the loop: with
        # one per session, 1,000 busy sessions made a timer 15 s late.
        if self.now() - self._resumed_at >= self._share:
            await self._yield()
        # trio shuffles the ready tasks, so those that were woken may need a second pass
        for _ in range(2):
            if not self._resuming and not self._mail:
                break
            await self._yield()

    async def _yield(self) -> None:
        seen = self._pass
        self._yields += 1
        await self._checkpoint()
        if seen == self._pass:  # the first to come back: a new pass over the ready tasks begins
            self._pass += 1
            self._share = SLICE_SECS / self._yields
            self._yields = 0
        self._resumed_at = self.now()

    def _wake_here(self, slot: Slot, value: Any) -> None:
        if slot.is_woken:
            return
        slot.is_woken = True
        slot.value = value
        if slot.waiter is not None:
            self._resuming.add(slot)
            self._resume(slot.waiter)

    def _deliver(self) -> None:
        while self._mail:
            self._wake_here(*self._mail.popleft())

    @abstractmethod
    def _ring(self) -> None:
        """Have the event loop call `_deliver` soon; dropped when the loop is closed."""

    @abstractmethod
    async def _suspend(self, slot: Slot, until: float) -> None:
        """Set `slot.waiter` and suspend until it is resumed or the time has come."""

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
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds weak references only
        # uvloop's clock ticks in milliseconds and stands still within a callback
        exact = isinstance(self._loop, asyncio.BaseEventLoop)
        self._clock = self._loop.time if exact else time.monotonic

    def now(self) -> float:
        return self._clock()

    async def _suspend(self, slot: Slot, until: float) -> None:
        slot.waiter = self._loop.create_future()
        if until == math.inf:
            await slot.waiter
            return
        delay = max(0.0, until - self._clock())
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
            self._mail.clear()

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
        self._token = trio.lowlevel.current_trio_token()
        self._clock = trio.lowlevel.current_clock()

    def now(self) -> float:
        return self._clock.current_time()

    async def _suspend(self, slot: Slot, until: float) -> None:
        slot.waiter = self._trio.lowlevel.current_task()

        def abort(_: object) -> Any:
            slot.waiter = None
            return self._trio.lowlevel.Abort.SUCCEEDED

        if until == math.inf:
            await self._trio.lowlevel.wait_task_rescheduled(abort)
            return
        with self._trio.CancelScope(deadline=until) as scope:
            await self._trio.lowlevel.wait_task_rescheduled(abort)
        if scope.cancelled_caught:
            self._wake_here(slot, TIMED_OUT)

    def _checkpoint(self) -> Awaitable[Any]:
        return self._trio.lowlevel.checkpoint()

    def _resume(self, waiter: Any) -> None:
        self._trio.lowlevel.reschedule(waiter)

    def _ring(self) -> None:
        try:
            self._token.run_sync_soon(self._deliver, idempotent=True)
        except self._trio.RunFinishedError:
            self._mail.clear()

    def _spawn(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        from contextvars import copy_context

        self._trio.lowlevel.spawn_system_task(fn, *args, context=copy_context())


_installed: ContextVar[Engine | None] = ContextVar("asynchooks_engine", default=None)
_real_time: anyio.lowlevel.RunVar[Engine] = anyio.lowlevel.RunVar("asynchooks_engine")


def current_engine() -> Engine:
    """The engine of the running task: the one installed, else real time on its event loop."""
    installed = _installed.get()
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
    token = _installed.set(engine)
    try:
        yield
    finally:
        _installed.reset(token)


def now() -> float:
    """Seconds on the current engine's clock; on the system's where no engine is running."""
    try:
        return current_engine().now()
    except RuntimeError:
        return time.monotonic()
