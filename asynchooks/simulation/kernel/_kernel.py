"""The kernel: virtual time as an engine. One heap holds every wake-up, one entry fires at a time.

An entry is (time, order of asking, what it wakes); it fires only when no task can run. How a task
is suspended and resumed is said by the three kernels made of this. Nothing here knows of workers.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .._engine import Engine, Slot
from .._errors import DeadlockError, LivelockError, SimulationError
from ._entries import NOTHING, Call, Target
from ._kernel_task import KernelTask, Start
from ._recording import Recording
from ._waits import describe

_AFTER_ALL = 1 << 200
"""An order of asking behind every other of the same time."""
_TICK = 2.0**-40
_TICKS_OF_A_TURN = 32
"""One of them is a step: so many steps in a row, and others get their turn."""
_KEPT_STALE = 1000
"""So many entries that will wake nobody are kept before the heap is swept."""
_MOST_NOTES = 8
"""Of later errors, at the first one."""


class Kernel(Engine):
    """Clock, heap and tasks of one simulation, which makes it and runs it once.

    Args:
        orders: gives the order of each asking, which decides among equal times; all differ.
        max_turns: how often the tasks of one simulation may run at one virtual time, per task.
        recording: takes down what fires, if anybody wants to know.
    """

    is_virtual = True

    def __init__(
        self,
        orders: Iterator[int] | None = None,
        max_turns: int = 10_000,
        recording: Recording | None = None,
    ) -> None:
        self.entry: tuple[float, int, Any] = (0.0, 0, None)  # fired last: the present moment
        self.fires_freely_until = math.inf  # the last moment whose entries need no closer look
        self.live: dict[KernelTask, None] = {}  # in order of starting
        self.recording = recording
        self.error: BaseException | None = None  # the first; it leaves the run as itself
        self._num_later = 0  # errors that came after it
        self.is_ending = False
        self.broken_by: SimulationError | None = None  # why no wait is possible any more
        self._stop_at = math.inf  # the last moment whose entries fire
        self._condition: Callable[[], bool] | None = None  # looked at before each entry
        self._num_outside = 0  # pieces of outside work under way
        self._heap: list[tuple[float, int, Any]] = []
        self._next_order = (itertools.count(1) if orders is None else orders).__next__
        self._last_orders = itertools.count(_AFTER_ALL).__next__
        self._num_stale = 0  # entries that will fire nothing
        self._max_turns = max_turns
        self._turns_at = -1.0  # the time at which these were counted:
        self._turns_here = 0  # entries fired
        self._most_live = 0  # tasks at once, as far as any of them has ended
        self._to_end: set[KernelTask] = set()  # live, and cancelled by the end of the run
        self._thread = threading.get_ident()
        self._mail: deque[tuple[Slot, Any]] = deque()  # wakes of other threads
        self._num_started = 0
        # steps cost no time: `tick` counts them, so that a turn comes due after some
        self.tick = itertools.count(0.0, _TICK).__next__  # type: ignore[method-assign]
        self.turn_due_at = 0.0
        self._look_closer()

    def _look_closer(self) -> None:
        """Say how far a kernel may fire entries without asking `next_target`."""
        is_plain = not (self.recording or self._condition or self._num_outside)
        self.fires_freely_until = self._stop_at if is_plain else -math.inf

    def stop_when(self, stop_at: float, condition: Callable[[], bool] | None) -> None:
        """End the run after that moment, or as soon as the condition holds."""
        self._stop_at, self._condition = stop_at, condition
        self._look_closer()

    @property
    def time(self) -> float:
        """The present moment, in virtual seconds."""
        return self.entry[0]

    def now(self) -> float:
        return self.entry[0]

    @property
    def is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def push(self, time: float, target: Target) -> None:
        """Have the target fire at that time, and not before; once only."""
        order = target.due = self._next_order()
        heapq.heappush(self._heap, (time, order, target))

    def wake(self, slot: Slot, value: Any = None) -> None:
        if threading.get_ident() != self._thread:
            self.wake_from_signal(slot, value)
        elif not slot.is_woken:
            slot.is_woken = True
            slot.value = value
            waiter = slot.waiter
            if waiter is not None:
                self.turn_due_at = -math.inf
                if waiter.due:
                    self.forget_one()
                self.push(self.entry[0], waiter)

    def wake_from_signal(self, slot: Slot, value: Any = None) -> None:
        # the handler may have interrupted a change of the heap
        self._mail.append((slot, value))
        self.fires_freely_until = -math.inf
        self._ring()

    def deliver(self) -> None:
        """Wake whom other threads have woken meanwhile."""
        self._look_closer()
        while self._mail:
            self.wake(*self._mail.popleft())

    async def turn(self) -> None:
        await self.sleep(0.0)
        self.turn_due_at = self.tick() + _TICKS_OF_A_TURN * _TICK

    async def quiescence(self) -> None:
        """Wait until nothing else is left to happen at this virtual time."""
        slot = Slot(self, "quiescence")
        call = Call(slot.wake, "quiescence")
        call.due = order = self._last_orders()
        heapq.heappush(self._heap, (self.time, order, call))
        await self.park(slot)

    @abstractmethod
    def sleep(self, secs: float) -> Awaitable[None]:
        """Suspend for exactly that many virtual seconds, >= 0. Cancellation safe."""

    @abstractmethod
    def _ring(self) -> None:
        """Have `deliver` called soon, unless the run is over; from another thread."""

    @abstractmethod
    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run until main has ended and every other task, too; raises `error`."""

    @abstractmethod
    def begin(self, task: KernelTask) -> None:
        """Make it a task that runs, in its context; at its entry."""

    @abstractmethod
    def _release(self) -> None:
        """Nothing is left to run: let `run` return."""

    @abstractmethod
    def _break_waits(self, error: SimulationError) -> None:
        """Let every wait end by the error, shielded or not: tasks catch their cancellation."""

    @abstractmethod
    def num_threads_busy(self) -> int:
        """How many threads of the program work for its tasks now, as far as that can be known."""

    def start(
        self, fn: Callable[..., Awaitable[None]], *args: Any, name: str | None = None
    ) -> KernelTask:
        self._num_started += 1
        task = self._new_task(name or self._num_started)
        task.body = (fn, args)
        self.live[task] = None
        self.push(self.time, Start(task))
        return task

    @abstractmethod
    def _new_task(self, name: str | int) -> KernelTask: ...

    def has_ended(self, task: KernelTask, error: BaseException | None) -> None:
        """A task is over; an error ends the simulation."""
        self._most_live = max(self._most_live, len(self.live))
        del self.live[task]
        self._to_end.discard(task)
        task.is_done = True
        waiting, task.waiting = task.waiting, None
        for slot in waiting or ():
            self.wake(slot)
        if error is not None or task.is_main:
            self.end(error)
        if self.is_ending and not self._to_end:  # those that clean-up started have no end yet
            self._cancel_all()

    def end(self, error: BaseException | None = None) -> None:
        """Cancel every task, in order of starting; the run returns when the last is over."""
        if self.error is None:
            self.error = error
        elif error is not None and error is not self.error:
            self._num_later += 1
            if self._num_later <= _MOST_NOTES:
                self.error.add_note(f"later: {error!r}")
            elif self._num_later == _MOST_NOTES + 1:  # a thousand workers may fail alike
                self.error.add_note("later: more errors, left out")
        if self.is_ending:
            return
        self.is_ending = True
        self.stop_when(math.inf, None)  # clean-up may take its time
        self._cancel_all()

    def _cancel_all(self) -> None:
        self._to_end.update(self.live)
        for task in list(self.live):
            task.cancel()
        if not self.live:
            self.recording = None  # an event loop may fire entries that wake nobody as it closes
            self._release()

    def next_target(self, before: float = math.inf) -> Target | None:
        """Advance to the next entry and take it out; None if there is nothing to fire now.

        Then tasks wait for what is outside of the simulation, or the run is over, or the event
        loop's own timer `before` comes first: time has advanced to that.
        """
        heap = self._heap
        while True:
            if self._mail:
                self.deliver()
            if self._condition is not None:
                self._look_at_condition(self._condition)
            time, order, target = heap[0] if heap else (math.inf, 0, None)
            if target is not None and target.due != order:
                heapq.heappop(heap)
                self._num_stale -= 1
                continue
            if time > before:
                time, target = before, None
            if time > self.entry[0] and self._is_outside_busy():
                return None
            if time == math.inf:
                self._nothing_left()
                if not heap:
                    return NOTHING if self.live else None
                continue
            if time > self._stop_at:
                self.entry = (self._stop_at, 0, None)
                self.end()
                continue
            if target is None:
                if time > self.entry[0]:
                    self.entry = (time, 0, None)
                return None
            self.count_turn(time)
            if self._turns_here > self._max_turns and self._refuse_livelock(repr(target)):
                if self.broken_by is not None:
                    return NOTHING  # tasks run now
                continue
            self.entry = heapq.heappop(heap)
            target.due = 0
            if self.recording is not None:
                self.recording.fired(time, target)
            fired: Target = target
            return fired

    def forget_one(self) -> None:
        """One more entry will fire nothing; the heap is swept when they are many."""
        self._num_stale += 1
        if self._num_stale > _KEPT_STALE and 2 * self._num_stale > len(self._heap):
            self._heap[:] = [each for each in self._heap if each[2].due == each[1]]
            heapq.heapify(self._heap)
            self._num_stale = 0

    def _look_at_condition(self, condition: Callable[[], bool]) -> None:
        try:
            is_over = condition()
        except BaseException as error:
            self.end(error)
        else:
            if is_over:
                self.end()

    def count_turn(self, time: float) -> None:
        """One more turn at this time, which the turbo kernel may have reached without a count."""
        if time == self._turns_at:
            self._turns_here += 1
        else:
            self._turns_at, self._turns_here, self._most_live = time, 0, 0

    def _refuse_livelock(self, what: str) -> bool:
        """Enough turns without spending time: end, if there are not as many tasks as that."""
        num_tasks = max(self._most_live, len(self.live))
        if self._turns_here <= self._max_turns * num_tasks:
            return False
        self._turns_here = 0
        error = LivelockError(
            f"{num_tasks} tasks took more than {self._max_turns} turns each at virtual time "
            f"{self.time!r}, the last of them {what}: they go on without spending time. Let them "
            "sleep or compute for more than 0 s, or give Simulation a larger max_turns."
        )
        if self.is_ending:
            self._force_end(error)
        else:
            self.end(error)
        return True

    def _force_end(self, error: SimulationError) -> None:
        """What is left would never end by its cancellation alone."""
        if self.broken_by is not None:  # not even that has ended them
            raise error
        self.broken_by = error
        self.error = self.error or error
        self._break_waits(error)

    @property
    def is_outside_declared(self) -> bool:
        """Whether the program said that outside work is under way."""
        return self._num_outside > 0

    def _is_outside_busy(self) -> bool:
        return self._num_outside > 0 or self.num_threads_busy() > 0

    def _nothing_left(self) -> None:
        """No entry is left, but tasks wait: a deadlock, or they shield themselves for ever."""
        if not self.live:
            return
        error = DeadlockError(
            f"nothing is left to happen at virtual time {self.time!r}, but tasks wait:\n"
            f"{describe(self.running_tasks())}\nLet somebody wake them, or end them by a stop, a "
            "cancellation or a timeout."
        )
        if self.is_ending:
            self._force_end(error)
        else:
            self.end(error)

    @contextmanager
    def outside_work(self) -> Iterator[None]:
        """Virtual time stands still within the block."""
        self._num_outside += 1
        self._look_closer()
        try:
            yield
        finally:
            self._num_outside -= 1
            self._look_closer()
            self._ring()
