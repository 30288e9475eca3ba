"""The turbo kernel: coroutines driven without any event loop.

It takes programs that wait through asynchooks only; any other await is an error that says which.
"""

from __future__ import annotations

import heapq
import math
import queue
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, copy_context
from types import TracebackType, coroutine
from typing import Any

from .._engine import TIMED_OUT, ShieldedScope, Slot, use_engine
from .._errors import LivelockError, SimulationError
from ._entries import Call, check_secs
from ._foreign import foreign_await, foreign_error
from ._kernel import Kernel
from ._kernel_task import KernelTask

_MOST_THROWS = 1000
"""So often a task may go on waiting against its cancellation, at one moment."""


class Cancelled(BaseException):
    """What a cancelled task gets at its wait. Let it pass."""

    def __init__(self, scope: object) -> None:
        super().__init__("cancelled")
        self.scope = scope


class _HasChangedContext(Exception):  # noqa: N818 - it never leaves where it is raised
    """A task has set a variable in the context that is common."""


class TurboTask(KernelTask):
    """A coroutine with its place in the heap; the entry that resumes it holds the task itself."""

    __slots__ = ("is_cancelled", "is_guarded", "run", "shield")

    kernel: TurboKernel

    def __init__(self, kernel: Kernel, name: str | int) -> None:
        super().__init__(kernel, name)
        self.run: Any = None  # of a context of its own
        self.shield: _Shield | None = None  # the innermost
        self.is_cancelled = False
        self.is_guarded = False  # cancelled, or shielded: its waits need a closer look

    def fire(self) -> None:
        self.kernel.resume(self, self.body.send, None)

    def cancel(self) -> None:
        if not self.is_done:
            self.kernel.push(self.kernel.time, Call(self._be_cancelled, f"cancel {self.name}"))

    def _be_cancelled(self) -> None:
        self.is_cancelled = self.is_guarded = True
        self.kernel.interrupt(self)

    def cancelled_by(self) -> object | None:
        """What cancels its waits now: a shield whose time is over, the task itself, or nothing."""
        shield = self.shield
        while shield is not None:
            if shield.is_over:
                return shield
            if shield.shield:
                return None
            shield = shield.outer
        return self if self.is_cancelled else None


class TurboKernel(Kernel):
    """Resumes coroutines one after the other; the fastest, for sweeps over many workers."""

    _is_released = False
    _is_interrupted = False
    _common: Context
    _is_shared: bool  # whether tasks may share the common context
    _entered: Context
    _owner: TurboTask | None = None

    def _new_task(self, name: str | int) -> KernelTask:
        task, context = TurboTask(self, name), copy_context()
        if not self._is_shared or differ(context, self._common):
            task.run = context.run
        return task

    @coroutine
    def park(self, slot: Slot, until: float = math.inf) -> Generator[float, None, Any]:
        if not slot.is_woken:
            slot.waiter = self.entry[2]
            try:
                yield until if until > self.entry[0] else self.entry[0]
            finally:
                slot.waiter = None
            if not slot.is_woken:
                slot.is_woken = True
                slot.value = TIMED_OUT
        return slot.value

    @coroutine
    def sleep(self, secs: float) -> Generator[float, None, None]:
        if type(secs) is not float or not secs >= 0.0:
            secs = check_secs(secs)
        yield self.entry[0] + secs

    def shielded(self, seconds: float) -> AbstractContextManager[ShieldedScope]:
        return _Shield(self, seconds)

    def running_tasks(self) -> list[tuple[str, object]]:
        return [(task.name, task.body) for task in self.live]

    def num_threads_busy(self) -> int:
        return 0  # a thread that works for a task would need an event loop to say so

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        hooks = sys.get_asyncgen_hooks()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # signal handlers may put
        try:
            sys.set_asyncgen_hooks(finalizer=self._close_later)
            with use_engine(self), self._heeding_interrupts():
                self._common = copy_context()
                self._is_shared = all(map(_differs_if_other, self._common.values()))
                self.start(main, name="main").is_main = True
                while not self._is_released:
                    self._entered, self._owner = self._common.copy(), None
                    self._entered.run(self._fire_all)
        finally:
            sys.set_asyncgen_hooks(*hooks)
        if self.error is not None:
            raise self.error

    @contextmanager
    def _heeding_interrupts(self) -> Iterator[None]:
        """Ctrl-C ends the run at its next entry, as on an event loop; a second one at once."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def interrupt(*_: object) -> None:
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._is_interrupted = True
            slot = Slot(self, "an interrupt")
            slot.waiter = Call(lambda: self.end(KeyboardInterrupt()), "an interrupt")
            self.wake_from_signal(slot)

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _close_later(self, generator: Any) -> None:
        self.start(generator.aclose, name=f"the end of {generator.__qualname__}")

    def _fire_all(self) -> None:
        """One entry after the other; the usual one, a task's own, without any further call.

        It runs in the context that all tasks share that have changed nothing in theirs: entering
        10,000 contexts would cost more than the rest. Who changes it keeps it, and this returns.
        """
        heap, next_order, replace = self._heap, self._next_order, heapq.heapreplace
        last, turns, most_turns = -1.0, 0, self._max_turns
        entered, common, never = self._entered, self._common, math.inf
        while not self._is_released:
            # not `while heap`: CPython 3.11 warms code up at unconditional jumps back only
            while True:
                if not heap:
                    break
                entry = heap[0]
                time, order, task = entry
                if task.due != order or time > self.fires_freely_until:
                    break
                if time != last:
                    last, turns = time, 0
                elif turns < most_turns:
                    turns += 1
                else:
                    break
                self.entry = entry
                try:
                    run = task.run
                    until = task.body.send(None) if run is None else run(task.body.send, None)
                except BaseException as error:
                    self._unplace(task)
                    if run is None and differ(entered, common):
                        self._owner = task  # nobody goes on in what it has changed
                    self._has_left(task, error)
                    break
                try:
                    if run is None and entered != common:
                        raise _HasChangedContext
                except Exception:  # that, or values that cannot be compared, such as arrays
                    self._unplace(task)
                    if task.__class__ is TurboTask:
                        self._give_context(task)
                        self._park(task, until)
                    return
                # another may be first now, by another order than first come, or after a sweep
                if type(until) is float and heap[0] is entry and not task.is_guarded:
                    if until < never:
                        task.due = order = next_order()
                        replace(heap, (until, order, task))
                    else:
                        task.due = 0
                        heapq.heappop(heap)
                else:
                    self._unplace(task)
                    if task.__class__ is TurboTask:
                        self._park(task, until)
            if self._is_released or self._owner is not None:
                break
            target = self.next_target()
            if target is not None:
                target.fire()
                if self._owner is not None:
                    return
            elif not self._is_released:  # until outside work is over, or has woken somebody
                self._news.get()

    def resume(self, task: TurboTask, how: Callable[[Any], Any], value: Any) -> None:
        """Run the task, by `send` or `throw`, until it waits again."""
        self.entry = (self.entry[0], 0, task)
        try:
            until = self._call(task, how, value)
        except BaseException as error:
            self._has_left(task, error)
        else:
            self._park(task, until)

    def _call(self, task: TurboTask, how: Callable[[Any], Any], value: Any) -> Any:
        if task.run is not None and task is not self._owner:
            return task.run(how, value)
        try:
            return how(value)
        finally:
            if task.run is None and differ(self._entered, self._common):
                self._give_context(task)

    def _give_context(self, task: TurboTask) -> None:
        """The context that has been common is this task's alone now."""
        task.run, self._owner = self._entered.run, task

    def interrupt(self, task: TurboTask) -> None:
        """Throw what cancels its wait now, if anything does; a task that runs gets it there."""
        scope = None if type(task.body) is tuple else task.cancelled_by()  # not begun yet
        if scope is not None and not task.is_done:
            if task.due:
                self._unplace(task)
            self.resume(task, task.body.throw, Cancelled(scope))

    def _unplace(self, task: TurboTask) -> None:
        """Its entry in the heap fires nothing."""
        task.due = 0
        self.forget_one()

    def _park(self, task: TurboTask, until: Any) -> None:
        """It waits now: until then, until it is woken, or not at all, as it is cancelled."""
        for _ in range(_MOST_THROWS):
            scope = task.cancelled_by()
            if self.broken_by is not None:
                error: BaseException = self.broken_by
            elif scope is not None:
                error = Cancelled(scope)
                if isinstance(until, (float, int)) and until < math.inf:
                    self._next_order()  # on an event loop it has asked for its time, too
            elif isinstance(until, (float, int)):
                if until < math.inf:
                    self.push(float(until), task)
                return
            else:
                error = foreign_await(task.body, until)
            try:
                until = self._call(task, task.body.throw, error)
            except BaseException as left:
                self._has_left(task, left)
                return
        self._has_left(task, LivelockError(f"{task!r} goes on waiting though it is cancelled"))

    def _has_left(self, task: TurboTask, error: BaseException) -> None:
        if task.__class__ is not TurboTask:  # a function that an entry calls has failed
            self.end(error)
        elif isinstance(error, (StopIteration, Cancelled)):
            self.has_ended(task, None)
        else:
            self.has_ended(task, foreign_error(error))

    def begin(self, task: KernelTask) -> None:
        assert isinstance(task, TurboTask)
        fn, args = task.body
        try:
            task.body = as_coroutine(self._call(task, lambda _: fn(*args), None))
        except BaseException as error:  # e.g. other arguments than it takes
            self._has_left(task, error)
            return
        self.resume(task, task.body.send, None)

    def _break_waits(self, error: SimulationError) -> None:
        for task in list(self.live):
            assert isinstance(task, TurboTask)
            if type(task.body) is not tuple and not task.is_done:  # else it has not begun
                if task.due:
                    self._unplace(task)
                self.resume(task, task.body.throw, error)

    def _ring(self) -> None:
        self._news.put(None)

    def _release(self) -> None:
        self._is_released = True


def differ(one: Context, other: Context) -> bool:
    """Whether a variable has another value in one of them."""
    try:
        return one != other
    except Exception:  # of values that cannot be compared, such as arrays
        return True


def _differs_if_other(value: object) -> bool:
    """Whether no other object passes for it: contexts compare values as `==` does.

    A task that sets a variable to a list of its own, equal to the common one, must not share it.
    """
    return type(value).__eq__ is object.__eq__ or type(value) in (str, type(None))


def as_coroutine(awaitable: Any) -> Coroutine[Any, Any, Any]:
    """What can be driven: the coroutine itself, or one around another awaitable."""
    return awaitable if isinstance(awaitable, Coroutine) else _awaiting(awaitable)


async def _awaiting(awaitable: Awaitable[Any]) -> None:
    await awaitable


class _Shield:
    """A scope that the task's cancellation does not enter, until its time is over."""

    __slots__ = ("_kernel", "_seconds", "_task", "_timer", "cancelled_caught", "is_over",
                 "outer", "shield")  # fmt: skip

    def __init__(self, kernel: TurboKernel, seconds: float) -> None:
        self._kernel = kernel
        self._seconds = seconds
        self.shield = True
        self.is_over = self.cancelled_caught = False

    def __enter__(self) -> _Shield:
        kernel, task = self._kernel, self._kernel.entry[2]
        self._task, self.outer, task.shield = task, task.shield, self
        task.is_guarded = True
        self._timer = Call(self._end, "the end of a shielded scope")
        if (until := kernel.time + max(0.0, self._seconds)) < math.inf:
            kernel.push(until, self._timer)
        return self

    def _end(self) -> None:
        self.is_over = True
        self._kernel.interrupt(self._task)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        task = self._task
        task.shield = self.outer
        task.is_guarded = task.is_cancelled or task.shield is not None
        if self._timer.due:
            self._timer.due = 0
            self._kernel.forget_one()
        self.cancelled_caught = isinstance(error, Cancelled) and error.scope is self
        return self.cancelled_caught
