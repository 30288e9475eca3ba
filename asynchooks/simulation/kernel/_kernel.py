"""The kernel: virtual time as an engine. One heap holds every wake-up, one entry fires at a time.

An entry is (time, order of asking, target); it fires only when no task can run. Three kernels are
derived from this one, and say how a task is suspended and resumed. Nothing here knows of workers.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..._engine.base import Engine, EngineTask, Slot
from ..._errors import DeadlockError, LivelockError, SimulationError
from ._waits import describe

Until = float | Callable[[], bool]
"""The last virtual time, or a condition: what ends a run early."""
_AFTER_ALL = 1 << 200
"""An order of asking after every other of the same time."""
_TICK = 2.0**-40
_TICKS_OF_A_TURN = 32
"""Steps in a row after which other tasks get a turn; a step counts as one tick."""
_KEPT_STALE = 1000
"""Entries that fire nothing are swept from the heap once there are more than this."""
_MOST_NOTES = 8
"""Later errors that are noted at the first one."""


class Target(Protocol):
    """What an entry wakes; it fires only while `due` is the entry's order of asking."""

    due: int

    @property
    def is_daemon(self) -> bool:
        """Whether it makes no progress."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to wake, such as a wait that was cancelled."""

    def fire(self) -> None: ...


class Call:
    """A function that an entry calls outside of every task; it may only wake, start and cancel."""

    __slots__ = ("_fn", "_what", "due")

    is_daemon = is_over = False

    def __init__(self, fn: Callable[[], object], what: str) -> None:
        self.due = 0
        self._fn = fn
        self._what = what

    def fire(self) -> None:
        self._fn()

    def __repr__(self) -> str:
        return self._what


NOTHING = Call(lambda: None, "nothing")
"""For a kernel that has to check again which tasks can run."""


class KernelTask(EngineTask):
    """One task of a kernel; it ends with the simulation at the latest."""

    __slots__ = (
        "_name",
        "body",
        "due",
        "is_daemon",
        "is_done",
        "is_main",
        "kernel",
        "waiting",
    )

    is_over = False

    def __init__(self, kernel: Kernel, name: str | int) -> None:
        self.kernel = kernel
        self._name = name  # or its number
        self.due = 0
        self.body: Any = None  # its function and arguments; once it has begun, its coroutine
        self.is_done = False
        self.is_main = False
        self.is_daemon = False  # it makes no progress: all others may be deadlocked beside it
        self.waiting: dict[Slot, None] | None = None  # in order; None until a task waits

    @property
    def name(self) -> str:
        """The name that it was started with."""
        return self._name if isinstance(self._name, str) else f"task {self._name}"

    async def wait(self, until: float = math.inf) -> bool:
        if not self.is_done:
            slot = Slot(self.kernel, f"the end of {self.name}")
            if self.waiting is None:
                self.waiting = {}
            self.waiting[slot] = None
            try:
                await self.kernel.park(slot, until)
            finally:
                if self.waiting is not None:
                    del self.waiting[slot]
        return self.is_done

    def throw(self, error: BaseException) -> None:
        """Let its wait raise the error soon, as `cancel` does the cancellation."""
        what = f"{type(error).__name__} in {self.name}"
        self.kernel.push(self.kernel.time, Call(partial(self.kernel.throw, self, error), what))

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Event(NamedTuple):
    """One event: its time, and what happened, as text."""

    time: float
    what: str

    def __str__(self) -> str:
        return f"{self.time.hex()} {self.what}"


@dataclass(repr=False, eq=False, slots=True)
class Recording:
    """All `events` that happened, and what the program noted, in order. The kernel writes it."""

    events: list[Event] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Recording of {len(self.events)} events>"

    def to_bytes(self) -> bytes:
        """All of it, a line for each event, times as exact hexadecimal floats."""
        return "".join(f"{each}\n" for each in self.events).encode()

    def digest(self) -> str:
        """SHA-256 of `to_bytes`, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


class Chooser:
    """Asked for each entry that fires, and each step that an event loop would make by itself."""

    kernel: Kernel
    """Which asks it; the kernel says so itself."""

    def interject(self) -> None:
        """Before an entry is taken: a task may be cancelled now, or an error be raised in it."""

    def choose(self, ready: Sequence[object]) -> int:
        """The place of the one that goes on, of at least one."""
        raise NotImplementedError


class Kernel(Engine):
    """Clock, heap and tasks of one simulation, which makes it and runs it once."""

    is_virtual = True

    def __init__(
        self,
        max_turns: int,  # at one virtual time, per task
        recording: Recording | None,
        chooser: Chooser | None = None,  # None: always the first
    ) -> None:
        # fired last: its time is the current one
        self.entry: tuple[float, int, Any] = (0.0, 0, None)
        self.fires_freely_until = math.inf  # entries up to this time fire without `next_target`
        self.live: dict[KernelTask, None] = {}  # in order of starting
        self.recording = recording
        self.chooser = chooser
        if chooser is not None:
            chooser.kernel = self
        self.error: BaseException | None = None  # the first; it leaves the run as itself
        self._num_later = 0  # errors that came after it
        self.is_ending = False
        self.broken_by: SimulationError | None = None  # why no wait is possible from now on
        self._stop_at = math.inf  # the last moment whose entries fire
        self._condition: Callable[[], bool] | None = None  # checked before each entry
        self._num_outside = 0  # pieces of outside work under way
        self.heap: list[tuple[float, int, Any]] = []
        self.next_order = itertools.count(1).__next__
        self._last_orders = itertools.count(_AFTER_ALL).__next__
        self._num_stale = 0  # entries that fire nothing
        self.max_turns = max_turns
        self._turns_at = -1.0  # the time at which these were counted:
        self._turns_here = 0  # entries fired
        self._most_live = 0  # most tasks alive at once, counted as tasks end
        self._to_end: set[KernelTask] = set()  # live, and cancelled by the end of the run
        self._thread = threading.get_ident()
        self._thread_wakes: deque[tuple[Slot, Any]] = deque()  # wake-ups from other threads
        self._num_started = 0
        # steps cost no time: `tick` counts them, so that a turn comes due after some
        self.tick = itertools.count(0.0, _TICK).__next__  # type: ignore[method-assign]
        self.turn_due_at = 0.0
        self._update_fast_path()

    def stopwatch(self) -> float:
        self.tick()  # to look at it is a step of work, as to look at `tick`
        return self.now()

    def _update_fast_path(self) -> None:
        """Set up to which time a kernel may fire entries without `next_target`."""
        is_special = self.recording or self._condition or self._num_outside
        self.fires_freely_until = -math.inf if is_special or self.chooser else self._stop_at

    def stop_when(self, stop_at: float, condition: Callable[[], bool] | None) -> None:
        """End the run after that moment, or once the condition holds."""
        self._stop_at, self._condition = stop_at, condition
        self._update_fast_path()

    @property
    def time(self) -> float:
        """The current time, in virtual seconds."""
        return self.entry[0]

    def now(self) -> float:
        return self.entry[0]

    @property
    def is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def push(self, time: float, target: Target) -> None:
        """Let the target fire once, at that time."""
        order = target.due = self.next_order()
        heapq.heappush(self.heap, (time, order, target))

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
                    self.forget(waiter)
                self.push(self.entry[0], waiter)

    def wake_from_signal(self, slot: Slot, value: Any = None) -> None:
        # the handler may have interrupted a change of the heap
        self._thread_wakes.append((slot, value))
        self.fires_freely_until = -math.inf
        self._wake_loop()

    def deliver(self) -> None:
        """Wake the slots that other threads have asked to wake."""
        self._update_fast_path()
        while self._thread_wakes:
            self.wake(*self._thread_wakes.popleft())

    async def turn(self) -> None:
        await self.sleep(0.0)
        self.turn_due_at = self.tick() + _TICKS_OF_A_TURN * _TICK

    async def quiescence(self) -> None:
        """Wait until nothing else is left to happen at this virtual time."""
        slot = Slot(self, "quiescence")
        call = Call(slot.wake, "quiescence")
        call.due = order = self._last_orders()
        heapq.heappush(self.heap, (self.time, order, call))
        await self.park(slot)

    def hold(self, secs: float) -> None:
        """Advance the time while the running task goes on, as a call does that blocks the loop.

        What would have fired meanwhile fires afterwards, in the same order.
        """
        heap, (now, order, running) = self.heap, self.entry
        until, late, own = now + secs, [], None
        while heap and heap[0][0] < until:
            entry = heapq.heappop(heap)
            if entry[1] == order and entry[2] is running:
                own = entry  # the turbo kernel takes it out later
            elif entry[2].due == entry[1]:
                late.append(entry[2])
            else:
                self._num_stale -= 1
        for target in late:
            self.push(until, target)
        if own is not None:
            heapq.heappush(heap, own)
        self.entry = (until, order, running)

    @abstractmethod
    def sleep(self, secs: float) -> Awaitable[None]:
        """Suspend for exactly that many virtual seconds, >= 0. Cancellation safe."""

    @abstractmethod
    def _wake_loop(self) -> None:
        """Let `deliver` be called soon, unless the run is over; called from other threads."""

    @abstractmethod
    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run until main has ended and every other task, too; raises `error`."""

    @abstractmethod
    def begin(self, task: KernelTask) -> None:
        """Let the task run, in its context; called at its entry."""

    @abstractmethod
    def _release(self) -> None:
        """Nothing is left to run: let `run` return."""

    @abstractmethod
    def _break_waits(self, error: SimulationError) -> None:
        """Let every wait raise the error, shielded or not: tasks ignore their cancellation."""

    @abstractmethod
    def throw(self, task: KernelTask, error: BaseException) -> None:
        """Let the wait of a task raise the error."""

    def num_threads_busy(self) -> int:
        """How many threads of the program work for its tasks now, as far as is known."""
        return 0

    def start(
        self, fn: Callable[..., Awaitable[None]], *args: Any, name: str | None = None
    ) -> KernelTask:
        self._num_started += 1
        task = self._new_task(name or self._num_started)
        task.body = (fn, args)
        self.live[task] = None
        self.push(self.time, Call(partial(self.begin, task), f"the start of {task!r}"))
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
        if self.is_ending and not self._to_end:  # tasks that clean-up started are not cancelled yet
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
        self.stop_when(math.inf, None)  # clean-up may take any virtual time
        self._cancel_all()

    def _cancel_all(self) -> None:
        self._to_end.update(self.live)
        for task in list(self.live):
            task.cancel()
        if not self.live:
            self.recording = None  # an event loop may fire entries while it closes
            self._release()

    def next_target(self, before: float = math.inf) -> Target | None:
        """Advance to the next entry and take it out; None if there is nothing to fire now.

        None means that tasks wait for work outside of the simulation, that the run is over, or
        that the event loop's own timer at `before` comes first: time has advanced to that.
        """
        heap = self.heap
        while True:
            if self._thread_wakes:
                self.deliver()
            if self._condition is not None:
                self._check_condition(self._condition)
            if self.chooser is not None:
                self.chooser.interject()
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
            if self._turns_here > self.max_turns and self._refuse_livelock(repr(target)):
                if self.broken_by is not None:
                    return NOTHING  # tasks run now
                continue
            entry = self._take_entry()
            if entry is None:
                continue
            self.entry = entry
            fired: Target = entry[2]
            fired.due = 0
            if self.recording is not None:
                self.recording.events.append(Event(time, repr(fired)))
            return fired

    def _take_entry(self) -> tuple[float, int, Any] | None:
        """Take out the entry that fires next: the first, or one of its time that is chosen.

        None: what the first ones would wake has been cancelled.
        """
        heap = self.heap
        if self.chooser is None:
            return heapq.heappop(heap)
        ready: list[tuple[float, int, Any]] = []
        time = heap[0][0]
        while heap and heap[0][0] == time and (heap[0][1] < _AFTER_ALL or not ready):
            entry = heapq.heappop(heap)
            if entry[2].due != entry[1]:
                self._num_stale -= 1
            elif entry[2].is_over:
                entry[2].due = 0
            else:
                ready.append(entry)
        if not ready:
            return None
        self.entry = (time, 0, None)
        # those before the chosen one go to the end
        place = self.chooser.choose([target for _, _, target in ready])
        for each in ready[place + 1 :]:
            heapq.heappush(heap, each)
        for time, _, target in ready[:place]:
            self.push(time, target)
        return ready[place]

    def forget(self, target: Target) -> None:
        """Let the target's entry fire nothing; the heap is swept when there are many of these."""
        target.due = 0
        self._num_stale += 1
        if self._num_stale > _KEPT_STALE and 2 * self._num_stale > len(self.heap):
            self.heap[:] = [each for each in self.heap if each[2].due == each[1]]
            heapq.heapify(self.heap)
            self._num_stale = 0

    def is_left_to_daemons(self) -> bool:
        """Whether only daemon tasks have entries left."""
        if self._thread_wakes or self._is_outside_busy() or self._has_foreign_timers():
            return False
        return all(target.due != order or target.is_daemon for _, order, target in self.heap)

    def _has_foreign_timers(self) -> bool:
        """Whether another library has a timer that is not among the entries."""
        return False

    def describe_waits(self) -> str:
        """A text with a line for each thing that tasks other than daemons wait for."""
        daemons = {task.name for task in self.live if task.is_daemon}
        return describe(each for each in self.running_tasks() if each[0] not in daemons)

    def _check_condition(self, condition: Callable[[], bool]) -> None:
        try:
            is_over = condition()
        except BaseException as error:
            self.end(error)
        else:
            if is_over:
                self.end()

    @property
    def progress(self) -> tuple[float, int, int]:
        """Changes with each entry that fires, and each turn of the event loop; for any thread."""
        return *self.entry[:2], self._turns_here

    def count_turn(self, time: float) -> None:
        """Count a turn at this time, which the turbo kernel may have reached without counting."""
        if time == self._turns_at:
            self._turns_here += 1
        else:
            self._turns_at, self._turns_here, self._most_live = time, 0, 0

    def num_tasks(self) -> int:
        """How many are alive, or were when one ended at this time."""
        return max(self._most_live, len(self.live))

    def _refuse_livelock(self, what: str) -> bool:
        """End the run if the tasks took too many turns without spending time."""
        num_tasks = self.num_tasks()
        if self._turns_here <= self.max_turns * num_tasks:
            return False
        self._turns_here = 0
        error = LivelockError(
            f"{num_tasks} tasks took more than {self.max_turns} turns each at virtual time "
            f"{self.time!r}, the last of them {what}: they run on without spending time. Let them "
            "sleep or compute for more than 0 s, or give Simulation a larger max_turns."
        )
        self._fail(error)
        return True

    def _fail(self, error: SimulationError) -> None:
        """End the run; if it is ending already, the remaining tasks ignore their cancellation."""
        if not self.is_ending:
            self.end(error)
            return
        if self.broken_by is not None:  # breaking their waits has not ended them either
            raise error
        self.broken_by = error
        self.error = self.error or error
        self._break_waits(error)

    @property
    def is_outside_declared(self) -> bool:
        """Whether the program has declared outside work."""
        return self._num_outside > 0

    def _is_outside_busy(self) -> bool:
        return self._num_outside > 0 or self.num_threads_busy() > 0

    def _nothing_left(self) -> None:
        """No entry is left, but tasks wait: a deadlock, or an endless shielded wait."""
        if not self.live:
            return
        self._fail(
            DeadlockError(
                f"nothing is left to happen at virtual time {self.time!r}, but tasks wait:\n"
                f"{describe(self.running_tasks())}\nWake them, or end them by a stop, a "
                "cancellation or a timeout."
            )
        )

    @contextmanager
    def outside_work(self) -> Iterator[None]:
        """Virtual time stands still within the block."""
        self._num_outside += 1
        self._update_fast_path()
        try:
            yield
        finally:
            self._num_outside -= 1
            self._update_fast_path()
            self._wake_loop()


def check_secs(secs: float) -> float:
    """The seconds as a float, or an error."""
    try:  # NumPy's narrow floats are converted before they meet the time, which they would round
        checked = float(secs)
    except (TypeError, ValueError, OverflowError):
        checked = -1.0
    if not checked >= 0 or isinstance(secs, str):
        raise ValueError(f"secs is {secs!r}; give virtual seconds >= 0")
    return checked
