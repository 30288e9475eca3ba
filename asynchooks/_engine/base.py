"""The engine: the one seam through which asynchooks suspends, wakes and starts tasks.

Everything above waits by `park` and is woken by `wake`; nobody reads a clock but by `now`. Real
time runs on asyncio or trio; a simulation installs an engine of its own with `use_engine` and
the rest of the package does not notice. Nothing here knows of steps, hooks or sessions.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

import anyio
import anyio.lowlevel

from ._signal import Signal

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
    """What `Engine.shielded` gives: whether its time ran out, and whether it still shields."""

    shield: bool

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

    def wake_from_signal(self, slot: Slot, value: Any = None) -> None:
        """As `wake`, in a signal handler, which may have interrupted anything."""
        self.wake(slot, value)

    def hear_signals(self) -> Callable[[], None]:
        """Let a signal that any thread of the process gets wake a loop that sleeps; how to end it.

        Without it the loop may sleep on until its next timer, and Python's handler waits for that.
        Only in the main thread.
        """
        return lambda: None

    @abstractmethod
    def start(self, fn: Callable[..., Awaitable[None]], *args: Any) -> EngineTask:
        """Start `fn(*args)` as a task of its own. It must not raise: nobody could catch it."""

    @abstractmethod
    def shielded(self, seconds: float) -> AbstractContextManager[ShieldedScope]:
        """A scope that cancellation does not enter, for that many seconds at most."""

    @abstractmethod
    async def turn(self) -> None:
        """Let others run: whoever was woken always, all others when their share is due."""

    async def checkpoint(self) -> None:
        """Let all that are ready run once; a cancellation comes in here."""
        await self.turn()

    def is_being_cancelled(self) -> bool:
        """Whether a cancellation that the running task just caught was meant for it."""
        return True

    def running_tasks(self) -> list[tuple[str, object]]:
        """(Name, outermost coroutine) of each task of the event loop, for people; from any thread.

        From another thread it is a glimpse: tasks may come and go meanwhile. Empty where the
        engine does not know its tasks.
        """
        return []


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
        from ._real_time import new_engine

        engine = new_engine()
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


def system_now() -> float:
    """Seconds on the system's clock, alike in all threads: trio's begins anywhere."""
    return time.monotonic()


def now() -> float:
    """Seconds on the current engine's clock; on the system's where no engine is running."""
    try:
        return current_engine().now()
    except RuntimeError:
        return time.monotonic()
