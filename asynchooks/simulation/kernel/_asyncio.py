"""The kernel on asyncio: an event loop whose selector fires the next entry instead of sleeping."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
import selectors
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import anyio

from ..._engine.real_time import OnAsyncio
from ..._errors import OutsideWorkError, SimulationError
from ._anyio import REAL_IO, AnyioKernel, LoopTask, Step, Waiter
from ._kernel import KernelTask

_OWN_FILES = 1
"""The event loop's own pipe, by which threads wake it."""


class AsyncioKernel(OnAsyncio, AnyioKernel):
    """Every timer of the event loop is an entry: asyncio's own heap does not order equal times."""

    _loop: VirtualLoop
    _released: asyncio.Future[None]
    driver: asyncio.Task[Any] | None = None
    """The task that waits for the end of the simulation."""

    def _all_tasks(self) -> list[tuple[str, object]]:
        driver = self.driver
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not driver]
        named = [(task.get_name(), task.get_coro()) for task in tasks]
        return sorted(named, key=lambda each: each[0])  # coroutines have no order

    def _new_waiter(self) -> Waiter:
        return _FutureWaiter(self._loop.create_future())

    def _run_loop(self, fn: Callable[..., Awaitable[None]], *args: Any) -> None:
        options = {"loop_factory": lambda: VirtualLoop(self)}
        anyio.run(fn, *args, backend="asyncio", backend_options=options)

    def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop, self.driver = loop, asyncio.current_task()
        self._released = loop.create_future()

    async def _until_released(self) -> None:
        if self._released.cancelled():  # together with an earlier wait for it
            self._released = self._loop.create_future()
            if not self.live:
                return
        await self._released

    def _release(self) -> None:
        if not self._released.done():
            self._released.set_result(None)

    def begin(self, task: KernelTask) -> None:
        assert isinstance(task, LoopTask)
        task.body = self.body_of(task, *task.body)
        running = self._loop.create_task(task.body, name=task.name, context=task.context)
        self._loop.tasks.add(running)  # the loop itself holds weak references only
        running.add_done_callback(self._loop.tasks.discard)

    def _wake_loop(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.deliver)

    def _break_foreign_wait(self, coroutine: object) -> None:
        for task in asyncio.all_tasks(self._loop):
            if task.get_coro() is coroutine:
                task.cancel()  # asyncio's own knows no shields

    def _count_busy_threads(self) -> int:
        return self._loop.num_in_executors + _busy_workers()


class _FutureWaiter(Waiter):
    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        super().__init__()
        self._future = future

    @property
    def is_over(self) -> bool:
        return self._future.done()

    def suspend(self) -> Awaitable[Any]:
        return self._future

    def fire(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class _Timer(asyncio.TimerHandle):
    """A timer of the event loop as an entry: asyncio's own sleeps and timeouts are built on it."""

    __slots__ = ("due", "kernel")

    due: int
    kernel: AsyncioKernel
    is_daemon = is_over = False

    def cancel(self) -> None:
        if self.due:
            self.kernel.forget(self)
        super().cancel()

    def fire(self) -> None:
        self._run()

    def __repr__(self) -> str:
        return "a timer of the event loop"


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. The kernel makes it, anyio closes it."""

    def __init__(self, kernel: AsyncioKernel) -> None:
        self.kernel = kernel
        self.num_in_executors = 0
        self._executor: Any = None  # the default one
        self.tasks: set[asyncio.Task[None]] = set()
        self._ready: deque[asyncio.Handle]
        self._numbers: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._next_number = itertools.count().__next__
        super().__init__(_Selector(kernel, self))

    def time(self) -> float:
        return self.kernel.entry[0]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.kernel, timer.due = self.kernel, 0
        if math.isnan(when):
            raise SimulationError("a timer is to come after nan seconds; give a number >= 0")
        if when < math.inf:
            self.kernel.push(max(when, self.kernel.time), timer)
        return timer

    def create_task(self, *args: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(*args, **options)
        if self.kernel.chooser is not None:
            self._numbers[task] = self._next_number()
        return task

    def offer_steps(self, *, has_fired: bool) -> None:
        """Let steps of tasks be entries, of which one at a time is chosen.

        One alone that an entry has woken was chosen with that. What is no step of a task keeps its
        order, and all of it runs: it may be what delivers a cancellation, again and again until
        the tasks are over.
        """
        queue, own = self._ready, (None, self.kernel.driver)
        steps = [(task, each) for each in queue if (task := _task_of(each)) not in own]
        is_chosen = len(steps) == 1 and (has_fired or steps[0][0] in self.kernel.in_waits)
        if steps and not is_chosen:
            others = [each for each in queue if _task_of(each) in own]
            queue.clear()
            queue.extend(others)
            # event loops hand tasks over in orders of their own, such as that of a set
            steps.sort(key=lambda each: self._numbers.get(each[0], -1))
            self.kernel.ask_for_steps(
                Step(self.kernel, task, partial(queue.append, each)) for task, each in steps
            )

    @property
    def is_ready(self) -> bool:
        """Whether something is ready that is no entry."""
        return bool(self._ready)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> asyncio.Future[Any]:
        if executor is None:
            if self._executor is None:
                self.set_default_executor(
                    concurrent.futures.ThreadPoolExecutor(thread_name_prefix="simulated")
                )
            executor = self._executor
        call = executor.submit(func, *args)
        self.num_in_executors += 1
        future = asyncio.wrap_future(call, loop=self)
        # counts the thread, as its caller may be cancelled; called after the future's own callback,
        # so that time stands still until the outcome is there
        call.add_done_callback(self._leaves_executor)
        return future

    def set_default_executor(self, executor: Any) -> None:
        super().set_default_executor(executor)
        self._executor = executor

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        # without the timeout: since Python 3.12 it is 300 s, which pass at once in virtual time
        await super().shutdown_default_executor()

    def _leaves_executor(self, _: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.call_soon_threadsafe(self._has_left_executor)

    def _has_left_executor(self) -> None:
        self.num_in_executors -= 1


class _Selector(selectors.DefaultSelector):
    """Fires the next entry where it would sleep; sleeps only while outside work is under way."""

    def __init__(self, kernel: AsyncioKernel, loop: VirtualLoop) -> None:
        super().__init__()
        self._kernel, self._loop = kernel, loop

    def select(self, timeout: float | None = None) -> Any:
        kernel, loop = self._kernel, self._loop
        if kernel.chooser is not None and kernel.driver is not None:
            loop.offer_steps(has_fired=False)
        if not kernel.num_steps and (loop.is_ready or timeout is not None):
            kernel.look_at_turns()  # only poll for wake-ups: tasks are ready, or the loop stops
            return super().select(0)
        target = kernel.next_target()
        if target is None:
            return super().select(None)
        target.fire()
        if kernel.chooser is not None:
            loop.offer_steps(has_fired=True)
        return ()

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        if len(self.get_map()) >= _OWN_FILES and not self._kernel.is_outside_declared:
            error = OutsideWorkError(REAL_IO)
            self._kernel.end(error)  # itself, rather than an exception group of the program
            raise error
        return super().register(fileobj, events, data)


def _task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    """The task of which a handle is a step; asyncio's own errors find it by the same attribute."""
    owner = getattr(getattr(handle, "_callback", None), "__self__", None)
    return owner if isinstance(owner, asyncio.Task) else None


def _busy_workers() -> int:
    """How many threads of `anyio.to_thread` work for this event loop.

    The pool has no public count of them; anyio counts the borrowed tokens of the default limiter.
    """
    from anyio._backends import _asyncio

    try:
        workers, idle = _asyncio._threadpool_workers, _asyncio._threadpool_idle_workers
        return len(workers.get()) - len(idle.get())
    except LookupError:  # no thread yet
        return 0
    except AttributeError:  # another version of anyio
        return anyio.to_thread.current_default_thread_limiter().borrowed_tokens
