"""The common part of the kernels on asyncio and on trio: waits that an event loop suspends.

Code built on anyio works in them, at exact times; the order among equal times is guaranteed for
asynchooks's own waits only.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel

from ..._engine.base import TIMED_OUT, Slot
from ..._engine.current import use_engine
from ..._engine.real_time import TASK_CANCELLED
from ..._engine.stacks import frames_of
from ..._errors import SimulationError
from ._kernel import Call, Kernel, KernelTask, check_secs

_current: ContextVar[LoopTask | None] = ContextVar("asynchooks_simulated_task", default=None)

REAL_IO = (
    "a simulated program waits for real I/O, which takes no virtual time. Use simulated links, "
    "or declare it: `with simulation.outside_work():` lets virtual time stand still."
)


_BEFORE_ALL = -(1 << 200)
"""An order of asking before every other."""


class Step:
    """A step of a task that the event loop woke itself, at an event of anyio, as an entry.

    Args:
        task: the event loop's.
        make: lets the event loop make it next.
    """

    __slots__ = ("_kernel", "_make", "due", "task")

    is_daemon = is_over = False

    def __init__(self, kernel: AnyioKernel, task: Any, make: Callable[[], object]) -> None:
        self.due = 0
        self._kernel, self.task, self._make = kernel, task, make

    def fire(self) -> None:
        self._kernel.num_steps -= 1
        self._make()

    def __repr__(self) -> str:
        name = self.task.get_name() if hasattr(self.task, "get_name") else self.task.name
        return f"a step of {name}"


class LoopTask(KernelTask):
    """A task of the event loop, cancelled through a scope around it."""

    __slots__ = ("context", "scope")

    def __init__(self, kernel: Kernel, name: str | int) -> None:
        super().__init__(kernel, name)
        self.context: Context = copy_context()
        self.context.run(_current.set, self)
        self.scope = anyio.CancelScope()

    def cancel(self) -> None:
        if not self.is_done:
            cancel = partial(self.scope.cancel, TASK_CANCELLED)
            self.kernel.push(self.kernel.time, Call(cancel, f"cancel {self.name}"))


class AnyioKernel(Kernel):
    """Suspends by its event loop's means; the idle loop takes the next entry."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen: object = None
        self._step_orders = itertools.count(_BEFORE_ALL).__next__
        self.in_waits: set[object] = set()
        """The event loop's tasks in waits of this kernel, where one is chosen."""
        self.num_steps = 0
        """Steps that were asked for, and not made."""

    def _new_task(self, name: str | int) -> KernelTask:
        return LoopTask(self, name)

    async def park(self, slot: Slot, until: float = math.inf) -> Any:
        if not slot.is_woken:
            if self.broken_by is not None:
                raise self.broken_by
            slot.waiter = waiter = self._begin_wait()
            if until < math.inf:
                self.push(max(until, self.time), waiter)
            try:
                await waiter.suspend()
            finally:
                slot.waiter = None
                self._end_wait(waiter)
            if not slot.is_woken:
                slot.is_woken = True
                slot.value = TIMED_OUT
        return slot.value

    async def sleep(self, secs: float) -> None:
        if type(secs) is not float or not secs >= 0.0:
            secs = check_secs(secs)
        if self.broken_by is not None:
            raise self.broken_by
        waiter = self._begin_wait()
        if (until := self.entry[0] + secs) < math.inf:
            self.push(until, waiter)
        try:
            await waiter.suspend()
        finally:
            self._end_wait(waiter)

    def _begin_wait(self) -> Waiter:
        if self.chooser is not None:
            self.in_waits.add(self.current_task())
        return self._new_waiter()

    def _end_wait(self, waiter: Waiter) -> None:
        self.in_waits.discard(self.current_task() if self.chooser is not None else None)
        if waiter.due:
            self.forget(waiter)

    @contextmanager
    def shielded(self, seconds: float) -> Iterator[Any]:
        scope = anyio.CancelScope(shield=True)
        # not the scope's own deadline: its end is an entry, in order with all others
        timer = Call(scope.cancel, "the end of a shielded scope")
        if (until := self.time + max(0.0, seconds)) < math.inf:
            self.push(until, timer)
        with scope:
            try:
                yield scope
            finally:
                if timer.due:
                    self.forget(timer)

    def num_threads_busy(self) -> int:
        # only if there are other threads: a query of the pool costs more than a wake-up
        return self._count_busy_threads() if threading.active_count() > 1 else 0

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        self._run_loop(self._drive, main)
        if self.error is not None:
            raise self.error

    async def _drive(self, main: Callable[[], Awaitable[None]]) -> None:
        with use_engine(self):
            self._enter()
            self.start(main, name="main").is_main = True
            try:
                await self._until_released()
            except BaseException as error:  # Ctrl-C, as this event loop gives it
                self.end(error if isinstance(error, KeyboardInterrupt) else None)
                with anyio.CancelScope(shield=True):
                    await self._until_released()
                raise

    def running_tasks(self) -> list[tuple[str, object]]:
        begun = [task for task in self.live if type(task.body) is not tuple]
        ours = {task.body: task.name for task in begun}
        others = {coroutine: name for name, coroutine in self._all_tasks()}
        return [(name, coroutine) for coroutine, name in {**ours, **others, **ours}.items()]

    def ask_for_steps(self, steps: Iterable[Step]) -> None:
        """Let steps that the event loop would make by itself be entries, before all others."""
        for step in steps:
            self.num_steps += 1
            step.due = order = self._step_orders()
            heapq.heappush(self.heap, (self.time, order, step))

    def num_tasks(self) -> int:
        return max(super().num_tasks(), len(self.running_tasks()))

    def look_at_turns(self) -> None:
        """Count a turn of the event loop that fires no entry: there may be endlessly many."""
        if self._seen is not self.entry:
            self._seen = self.entry
            return
        self.count_turn(self.time)
        if self._turns_here > self.max_turns:
            is_ending = self.is_ending
            self._refuse_livelock("of another library's waits")
            if self.is_ending and not is_ending:  # its entries would never fire
                for task in list(self.live):
                    assert isinstance(task, LoopTask)
                    task.scope.cancel()

    async def body_of(
        self, task: LoopTask, fn: Callable[..., Awaitable[None]], args: tuple[Any, ...]
    ) -> None:
        """Run the task's function, and report its end to the kernel."""
        failure: BaseException | None = None
        try:
            with task.scope:
                try:
                    await fn(*args)
                except BaseException as error:
                    failure = self.failure_in(error)
                    if failure is None:
                        raise
        except BaseException as cancelled:  # not by its scope; for main this is an error
            is_lost = task.is_main and not self.is_ending
            self.has_ended(task, cancelled if is_lost else None)
            raise
        self.has_ended(task, failure)

    def _break_waits(self, error: SimulationError) -> None:
        for _, coroutine in self.running_tasks():
            if not self._break_wait(coroutine, error):
                self._break_foreign_wait(coroutine)

    def throw(self, task: KernelTask, error: BaseException) -> None:
        self._break_wait(task.body, error)

    def _break_wait(self, coroutine: object, error: BaseException) -> bool:
        """Whether it was a wait of the kernel, which raises the error now."""
        waiters = [frame.f_locals.get("waiter") for frame, _ in frames_of(coroutine)]
        ours = [each for each in waiters if isinstance(each, Waiter)]
        for waiter in ours:
            if waiter.due:  # it would be woken as well
                self.forget(waiter)
            waiter.fail(error)
        return bool(ours)

    @abstractmethod
    def _break_foreign_wait(self, coroutine: object) -> None:
        """Cancel the task that runs it, shielded or not."""

    @abstractmethod
    def _new_waiter(self) -> Waiter: ...

    @abstractmethod
    def _all_tasks(self) -> list[tuple[str, object]]:
        """(Name, coroutine) of each task of the event loop, but the one that runs the kernel."""

    @abstractmethod
    def _count_busy_threads(self) -> int: ...

    @abstractmethod
    def _run_loop(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run it on an event loop with this kernel's clock."""

    @abstractmethod
    def _enter(self) -> None:
        """The event loop runs now."""

    @abstractmethod
    async def _until_released(self) -> None: ...


class Waiter:
    """One suspension of a task; its entries fire while it lasts."""

    __slots__ = ("due", "task")

    def __init__(self) -> None:
        self.due = 0
        self.task = _current.get()

    @property
    def is_daemon(self) -> bool:
        return self.task is not None and self.task.is_daemon

    @property
    @abstractmethod
    def is_over(self) -> bool: ...

    @abstractmethod
    def suspend(self) -> Awaitable[Any]: ...

    @abstractmethod
    def fire(self) -> None: ...

    @abstractmethod
    def fail(self, error: BaseException) -> None: ...

    def __repr__(self) -> str:
        return repr(self.task)
