"""The engine: the one seam through which asynchooks suspends, wakes and starts tasks.

Everything above waits by `park`, is woken by `wake` and reads the clock by `now`. Real time runs
on asyncio or trio; a simulation installs an engine of its own with `use_engine`, and the rest of
the package does not notice. Nothing here knows of steps, hooks or sessions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import wraps
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar

from .._errors import is_thrown_away

P = ParamSpec("P")
T = TypeVar("T")


class Sentinel:
    """A value that is compared by identity alone, with a readable name."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


TIMED_OUT = Sentinel("TIMED_OUT")
"""What a slot is woken with when its deadline came first."""
STOPPED = Sentinel("STOPPED")
"""What a slot is woken with when a stop came first."""


class Slot:
    """One task's place to be woken, once. The first value wins.

    Args:
        engine: parks the task here, and wakes it.
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


class AsyncOnly:
    """What `async with` opens: a plain `with` is refused, with the remedy."""

    _in_with: str
    """What stands after `async with`, for people."""

    def __enter__(self) -> NoReturn:
        what = self._in_with
        raise TypeError(f"this is opened by `async with {what}:`, not by `with {what}:`")

    def __exit__(self, *_: object) -> None:
        """Python asks for it before it calls `__enter__`."""


class _AsyncBlock(AsyncOnly, AbstractAsyncContextManager[T]):
    def __init__(self, block: AbstractAsyncContextManager[T], call: str) -> None:
        self._block = block
        self._in_with = call

    async def __aenter__(self) -> T:
        return await self._block.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._block.__aexit__(*error)


def async_block(
    call: str,
) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, AbstractAsyncContextManager[T]]]:
    """As `asynccontextmanager`, for what users open; `call` is how they write it."""

    def decorate(
        fn: Callable[P, AsyncIterator[T]],
    ) -> Callable[P, AbstractAsyncContextManager[T]]:
        make = asynccontextmanager(fn)

        @wraps(fn)
        def made(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
            return _AsyncBlock(make(*args, **kwargs), call)

        return made

    return decorate


class EngineTask(ABC):
    """A task started by an engine.

    Example:
        simulation = Simulation(backend="turbo")

        async def main():
            task = simulation.start(simulation.sleep, 2.0)
            assert await task.wait()
            return simulation.now

        assert simulation.run(main) == 2.0
    """

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
    """When, by `tick`, `turn` would let others run; a busy task need not call it before."""

    event_loop: Any = None
    """asyncio's event loop, where it runs on one: for what concerns that alone."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether it belongs to another thread, in which an event loop of its own may run."""
        return False

    def tick(self) -> float:
        """Seconds, for how long a task is busy: the cheapest clock, for differences only.

        In virtual time work costs nothing, and this counts calls instead.
        """
        return self.now()

    def stopwatch(self) -> float:
        """Seconds, for how long a task waits: as cheap as `tick`, for differences only."""
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

    @abstractmethod
    def start(self, fn: Callable[..., Awaitable[None]], *args: Any) -> EngineTask:
        """Start `fn(*args)` as a task of its own. It must not raise: no caller could catch it.

        It first runs once the caller suspends, also where the event loop's task factory is eager:
        what the caller sets after the start is there.
        """

    def start_soon(self, fn: Callable[[], Awaitable[None]]) -> None:
        """Start `fn()` from any thread or signal handler; in virtual time nothing is started.

        It must not raise, and nothing waits for it.
        """
        return

    @abstractmethod
    def shielded(self, seconds: float) -> AbstractContextManager[Any]:
        """A scope that cancellation does not enter, for that many seconds at most.

        It has `shield`, `cancelled_caught` and `cancel` of anyio's scopes: whether it still
        shields, whether its time ran out, and what ends its time now.
        """

    @abstractmethod
    async def turn(self) -> None:
        """Let others run: tasks that were woken always, all others when their share is due."""

    async def checkpoint(self) -> None:
        """Let all that are ready run once; a cancellation comes in here."""
        await self.turn()

    def failure_in(self, error: BaseException) -> BaseException | None:
        """The part of an error just caught that is a failure; None: the error must be raised again.

        No failure is a cancellation of the running task, nor what a coroutine gets that is thrown
        away. Anything else is one, whatever its type: an exit, an error of another library that is
        no Exception, the cancellation of something that was awaited.
        """
        if isinstance(error, BaseExceptionGroup):  # of a nursery of trio's own it may hold both
            cancelled, rest = error.split(lambda each: self._is_cancellation(each))
            return error if cancelled is None else rest
        return None if is_thrown_away(error) or self._is_cancellation(error) else error

    @abstractmethod
    def _is_cancellation(self, error: BaseException) -> bool:
        """Whether the running task caught this error because it is being cancelled."""

    def cancellation_probe(self) -> Callable[[BaseException], bool]:
        """Of the running task, which `start` has started: whether an error that is thrown into it
        comes from its `cancel`.

        Others come from scopes within it, as that of a timeout, which may be shielded from it.
        """
        return lambda error: self.failure_in(error) is None

    def current_task(self) -> object | None:
        """The running task, compared by identity; None where the engine does not know it."""
        return None

    def is_alone(self) -> bool:
        """Whether the running task is the only one of its event loop; False where not known.

        Takes as long as it takes to look at all tasks.
        """
        return False

    def running_tasks(self) -> list[tuple[str, object]]:
        """(Name, outermost coroutine) of each task of the event loop, for people; from any thread.

        From another thread tasks may come and go meanwhile. Empty where the engine does not know
        its tasks.
        """
        return []
