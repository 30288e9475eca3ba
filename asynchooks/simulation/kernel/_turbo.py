"""The turbo kernel: coroutines driven without any event loop.

It runs programs that wait through asynchooks only; any other await is an error that names it.
"""

from __future__ import annotations

import heapq
import math
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import FrameType, coroutine
from typing import Any

from ..._engine.base import TIMED_OUT, Slot
from ..._engine.current import use_engine
from ..._engine.stacks import frames_of
from ..._errors import ForeignAwaitError, LivelockError, SimulationError
from ._kernel import Call, Kernel, KernelTask, Target, check_secs
from ._waits import is_users

_MOST_THROWS = 1000
"""How often, at one time, a task may go on waiting in spite of its cancellation."""
_NO_LOOP_TEXTS = {
    RuntimeError: (
        "no running event loop",
        "must be called from async context",
        "not currently running on any asynchronous event loop",
        "unknown async library",
    ),
    AttributeError: ("has no attribute 'create_future'", "'runcontext' object has no attribute"),
}
"""Texts of errors that other libraries raise where no event loop runs, in lower case."""


class Cancelled(BaseException):
    """Raised in the wait of a cancelled task. Let it pass."""

    def __init__(self, scope: object) -> None:
        super().__init__("cancelled")
        self.scope = scope


class TurboTask(KernelTask):
    """A coroutine that is itself the target of its entries in the heap."""

    __slots__ = ("go_on", "is_cancelled", "is_guarded", "run", "shield")

    kernel: TurboKernel

    def __init__(self, kernel: Kernel, name: str | int) -> None:
        super().__init__(kernel, name)
        self.run = copy_context().run  # in its own context
        self.go_on: Callable[[], Any]  # its coroutine, once it has begun
        self.shield: _Shield | None = None  # the innermost
        self.is_cancelled = False
        self.is_guarded = False  # cancelled or shielded: its waits take the slow path

    def fire(self) -> None:
        self.kernel.resume(self, self.body.send, None)

    def cancel(self) -> None:
        if not self.is_done:
            self.kernel.push(self.kernel.time, Call(self._be_cancelled, f"cancel {self.name}"))

    def _be_cancelled(self) -> None:
        self.is_cancelled = self.is_guarded = True
        self.kernel.interrupt(self)

    def cancelled_by(self) -> object | None:
        """What cancels its waits now: a shield past its time, the task itself, or nothing."""
        shield = self.shield
        while shield is not None:
            if shield.is_over:
                return shield
            if shield.shield:
                return None
            shield = shield.outer
        return self if self.is_cancelled else None


class TurboKernel(Kernel):
    """Resumes coroutines one after the other: the fastest kernel, for sweeps over many workers."""

    _is_released = False
    _is_interrupted = False

    def _new_task(self, name: str | int) -> KernelTask:
        return TurboTask(self, name)

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

    @contextmanager
    def shielded(self, seconds: float) -> Iterator[Any]:
        task: TurboTask = self.entry[2]

        def end() -> None:
            scope.is_over = True
            self.interrupt(task)

        def cancel() -> None:
            self.push(self.time, Call(end, "the cancellation of a shielded scope"))

        task.shield = scope = _Shield(task.shield, cancel)
        task.is_guarded = True
        timer = Call(end, "the end of a shielded scope")
        if (until := self.time + max(0.0, seconds)) < math.inf:
            self.push(until, timer)
        try:
            yield scope
        except Cancelled as error:
            scope.cancelled_caught = error.scope is scope
            if not scope.cancelled_caught:
                raise
        finally:
            task.shield = scope.outer
            task.is_guarded = task.is_cancelled or task.shield is not None
            if timer.due:
                self.forget(timer)

    def _is_cancellation(self, error: BaseException) -> bool:
        return isinstance(error, Cancelled)

    def cancellation_probe(self) -> Callable[[BaseException], bool]:
        task = self.entry[2]
        return lambda error: isinstance(error, Cancelled) and error.scope is task

    def running_tasks(self) -> list[tuple[str, object]]:
        return [(task.name, task.body) for task in self.live]

    def current_task(self) -> object | None:
        task: object = self.entry[2]  # resumed last
        return task

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        hooks = sys.get_asyncgen_hooks()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # signal handlers may put
        try:
            sys.set_asyncgen_hooks(finalizer=self._close_later)
            with use_engine(self), self._heeding_interrupts():
                self.start(main, name="main").is_main = True
                self._fire_all()
        finally:
            sys.set_asyncgen_hooks(*hooks)
        if self.error is not None:
            raise self.error

    @contextmanager
    def _heeding_interrupts(self) -> Iterator[None]:
        """Let Ctrl-C end the run at its next entry, as on an event loop; a second one at once."""
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
        """Fire one entry after the other; the usual one, a task's own, without further calls."""
        heap, next_order, replace = self.heap, self.next_order, heapq.heapreplace
        last, turns, most_turns, never = -1.0, 0, self.max_turns, math.inf
        while not self._is_released:
            # not `while heap`: CPython 3.11 specializes code at unconditional backward jumps only
            while True:
                if not heap:
                    break
                entry = heap[0]
                time, order, task = entry
                if task.__class__ is not TurboTask or task.due != order:
                    break
                if time > self.fires_freely_until:
                    break
                if time != last:
                    last, turns = time, 0
                elif turns < most_turns:
                    turns += 1
                else:
                    break
                self.entry = entry
                try:
                    until = task.go_on()
                except BaseException as error:
                    self.forget(task)
                    self._has_left(task, error)
                    break
                # another may be first now, after a sweep
                if type(until) is float and heap[0] is entry and not task.is_guarded:
                    if until < never:
                        task.due = order = next_order()
                        replace(heap, (until, order, task))
                    else:
                        task.due = 0
                        heapq.heappop(heap)
                else:
                    self.forget(task)
                    self._park(task, until)
            if self._is_released:
                break
            target = self.next_target()
            if target is not None:
                self._fire(target)
            elif not self._is_released:  # until outside work has ended, or has woken a task
                self._news.get()

    def _fire(self, target: Target) -> None:
        try:
            target.fire()
        except BaseException as error:  # of a function that an entry calls
            self.end(error)

    def resume(self, task: TurboTask, how: Callable[[Any], Any], value: Any) -> None:
        """Run the task, by `send` or `throw`, until it waits again."""
        self.entry = (self.entry[0], 0, task)
        try:
            until = task.run(how, value)
        except BaseException as error:
            self._has_left(task, error)
        else:
            self._park(task, until)

    def interrupt(self, task: TurboTask) -> None:
        """Throw its cancellation into its wait, if it is cancelled now."""
        scope = task.cancelled_by()
        if scope is not None:
            self.throw(task, Cancelled(scope))

    def _park(self, task: TurboTask, until: Any) -> None:
        """Let it wait: until that time, until it is woken, or not at all if it is cancelled."""
        for _ in range(_MOST_THROWS):
            scope = task.cancelled_by()
            if self.broken_by is not None:
                error: BaseException = self.broken_by
            elif scope is not None:
                error = Cancelled(scope)
                if isinstance(until, (float, int)) and until < math.inf:
                    self.next_order()  # as on an event loop, where it has got an order too
            elif isinstance(until, (float, int)):
                if until < math.inf:
                    self.push(float(until), task)
                return
            else:
                error = _foreign(f"it awaits {type(until).__name__}", frames_of(task.body))
            try:
                until = task.run(task.body.throw, error)
            except BaseException as left:
                self._has_left(task, left)
                return
        self._has_left(task, LivelockError(f"{task!r} goes on waiting though it is cancelled"))

    def _has_left(self, task: TurboTask, error: BaseException) -> None:
        if isinstance(error, (StopIteration, Cancelled)):
            self.has_ended(task, None)
        else:
            self.has_ended(task, _foreign_error(error))

    def begin(self, task: KernelTask) -> None:
        assert isinstance(task, TurboTask)
        fn, args = task.body
        try:
            made = task.run(fn, *args)
            task.body = made if isinstance(made, Coroutine) else _awaiting(made)
            task.go_on = partial(task.run, task.body.send, None)
        except BaseException as error:  # e.g. other arguments than it takes
            self._has_left(task, error)
            return
        self.resume(task, task.body.send, None)

    def _break_waits(self, error: SimulationError) -> None:
        for task in list(self.live):
            self.throw(task, error)

    def throw(self, task: KernelTask, error: BaseException) -> None:
        assert isinstance(task, TurboTask)
        if type(task.body) is not tuple and not task.is_done:  # else it has not begun
            if task.due:
                self.forget(task)
            self.resume(task, task.body.throw, error)

    def _wake_loop(self) -> None:
        self._news.put(None)

    def _release(self) -> None:
        self._is_released = True


async def _awaiting(awaitable: Awaitable[Any]) -> None:
    await awaitable


@dataclass(slots=True)
class _Shield:
    """A scope that shields from the task's cancellation until its time is over."""

    outer: _Shield | None
    cancel: Callable[[], None]
    shield: bool = True
    is_over: bool = False
    cancelled_caught: bool = False


def _foreign_error(error: BaseException) -> BaseException:
    """The error, or a ForeignAwaitError if another library raised it for want of an event loop."""
    text = str(error).lower()
    texts = _NO_LOOP_TEXTS.get(type(error), ())
    is_foreign = type(error).__name__ in ("NoEventLoopError", "AsyncLibraryNotFoundError")
    if not is_foreign and not any(each in text for each in texts):
        return error
    frames = traceback.walk_tb(error.__traceback__)
    foreign = _foreign(f"{type(error).__name__}: {error}", frames)
    foreign.__cause__ = error
    return foreign


def _foreign(what: str, frames: Iterable[tuple[FrameType, int]]) -> ForeignAwaitError:
    """The error, with the innermost of the frames that runs the user's code."""
    places = [(frame, line) for frame, line in frames if is_users(frame)]
    place = ""
    if places:
        frame, line = places[-1]
        place = f" at {frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
    return ForeignAwaitError(
        f'backend "turbo" could not take an await: {what}{place}. It takes waits of asynchooks '
        'only (sleep, global_step.wait_for, hooks, workers); use backend="asyncio" or "trio" '
        "for others."
    )
