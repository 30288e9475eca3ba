"""Which tasks wait for which global step, and whether it can still come.

A state machine without locks and without waiting: `Admission` and `GlobalStep` hold the counter's
lock around every call, and wake the waiters that a call returns.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, Protocol

from .._engine.base import Engine, Slot
from .._engine.stop import StopReason
from .source import SourceState


class Listener(Protocol):
    """A session, as the other sessions that share its model see it."""

    def stop_for(self, reason: StopReason) -> None:
        """Stop, without an error of one's own; from any thread."""


class Runs(Protocol):
    """The runs of one session, one at a time."""

    is_under_way: bool
    slots: tuple[Slot, ...]
    """Woken at the end of the next run."""


class Worker:
    """One open session, as a global step sees it: it may still move the step."""

    __slots__ = (
        "engine", "is_shared", "is_stopped", "listener", "next_end", "runs", "step", "task",
        "waits",
    )  # fmt: skip

    def __init__(self, listener: Listener | None = None, engine: Engine | None = None) -> None:
        self.listener = listener
        self.engine = engine
        self.is_stopped = False  # its listener was called by `stop_workers`
        # its waits in `before_run`, in an async step, in its body: during these it moves no step
        self.waits = 0
        self.step: Any = None  # the coroutine of the step that it runs, where that is one
        # what is known of the body of its `async with` block, where there is one
        self.task: object | None = None  # the task that opened it
        self.runs: Runs | None = None
        self.is_shared = False  # tasks other than that one run its steps
        self.next_end: Slot | None = None  # while its body waits: woken as another task's run ends

    def is_in_step(self, engine: Engine) -> bool:
        """Whether the running task is within this worker's step, an async one."""
        # a coroutine is running exactly as long as what it awaits does
        return self.engine is engine and getattr(self.step, "cr_running", False)

    def is_in_body(self, engine: Engine) -> bool:
        """Whether the running task is in the body of its block, and no other runs its steps."""
        if self.is_shared or self.runs is None or self.runs.is_under_way:
            return False
        return self.task is not None and self.task is engine.current_task()

    @property
    def runs_elsewhere(self) -> bool:
        """Whether its body waits while another task runs its steps."""
        runs, next_end = self.runs, self.next_end
        return (
            next_end is not None
            and runs is not None
            and (self.is_shared or runs.is_under_way or next_end.is_woken)
        )

    def begin_body_wait(self, engine: Engine) -> None:
        """Its body waits: watch whether other tasks run its steps; in its own task."""
        assert self.runs is not None
        self.next_end = Slot(engine, "the end of a run of another task")
        self.runs.slots += (self.next_end,)

    def end_body_wait(self) -> None:
        """Its body waits no more; in its own task."""
        runs, next_end = self.runs, self.next_end
        assert runs is not None
        self.is_shared, self.next_end = self.runs_elsewhere, None
        runs.slots = tuple(slot for slot in runs.slots if slot is not next_end)


class Waiter:
    """One task that waits for a step.

    `worker` is the session that makes no step until this wait ends; None if none is held up by it.
    """

    __slots__ = ("fails_on_loss", "is_gone", "slot", "worker")

    def __init__(self, slot: Slot, worker: Worker | None) -> None:
        self.slot = slot
        self.worker = worker
        self.fails_on_loss = False
        self.is_gone = False


class Waiters:
    """The waiters by (step, order of asking), and the workers that may move the step."""

    __slots__ = (
        "_heap", "_num_gone", "_num_idle", "_order", "is_closed", "limit_slots", "next_step",
        "num_workers", "opened", "restart_slots", "source_state", "stop_reason", "training",
        "workers",
    )  # fmt: skip

    def __init__(self, num_workers: float | None) -> None:
        self._heap: list[tuple[int, int, Waiter]] = []  # by step, then order of asking
        self.next_step = math.inf  # no waiter is due below it: all that a run has to look at
        self._num_gone = 0  # left, but still in the heap: taking one out would cost a scan
        self._num_idle = 0  # open workers that wait themselves
        self._order = 0
        self.limit_slots: list[Slot] = []  # to wake when the limit changes
        self.restart_slots: list[Slot] = []  # to wake when the step goes back
        self.num_workers = num_workers
        self.opened = 0
        self.workers: dict[Worker, None] = {}  # in order of opening
        self.training = object()
        self.stop_reason: StopReason | None = None  # of all workers, also of those yet to open
        self.is_closed = False
        self.source_state: SourceState | None = None  # None where no other process moves the step

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def open(self, worker: Worker) -> None:
        if not self.workers and self.opened >= (self.num_workers or math.inf):
            self.opened = 0  # all that were announced have come and gone: a new round begins
        self.opened += 1
        self.workers[worker] = None

    def close(self, worker: Worker) -> None:
        if worker in self.workers:
            del self.workers[worker]
            self._num_idle -= worker.waits > 0
            if not self.workers:
                self.stop_reason = None

    def set_idle(self, worker: Worker, is_idle: bool) -> None:
        """An open worker moves no step for now, or may do so again."""
        was_idle = worker.waits > 0
        worker.waits += 1 if is_idle else -1
        if worker in self.workers:
            self._num_idle += (worker.waits > 0) - was_idle

    def add(self, step: int, slot: Slot, worker: Worker | None) -> Waiter:
        waiter = Waiter(slot, worker)
        heapq.heappush(self._heap, (step, self._order, waiter))
        self.next_step = self._heap[0][0]
        self._order += 1
        if worker is not None:
            self.set_idle(worker, True)
        return waiter

    def count(self, waiter: Waiter, worker: Worker) -> None:
        """A waiter turns out to be the worker's own, which moves no step meanwhile."""
        waiter.worker = worker
        self.set_idle(worker, True)

    def is_first(self, waiter: Waiter) -> bool:
        """Whether all others wait for later steps, or asked later; without the lock."""
        return any(each is waiter for _, _, each in self._heap[:1])  # copied in one piece

    def leave(self, waiter: Waiter) -> None:
        """The waiter waits no more, whether it was woken or not."""
        if waiter.is_gone:
            return
        self._forget(waiter)
        self._num_gone += 1
        if self._num_gone > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_gone]
            heapq.heapify(self._heap)
            self._num_gone = 0
        self._find_next()

    def take_due(self, value: int) -> list[Waiter]:
        """Take out those whose step is reached, in order."""
        due: list[Waiter] = []
        while self._heap and self._heap[0][0] <= value:
            self._take(heapq.heappop(self._heap)[2], due)
        self._find_next()
        return due

    def take_unreachable(self) -> list[Waiter]:
        """Take out all, in order, if their steps can no longer come; after every change."""
        is_closed = self.is_closed or self.source_state is SourceState.CLOSED
        if not is_closed and self._may_come():
            return []
        taken: list[Waiter] = []
        for _, _, waiter in sorted(self._heap):
            self._take(waiter, taken)
        self._heap.clear()
        self._find_next()
        return taken

    def take_failing(self) -> list[Waiter]:
        """Take out the waiters that fail when the source is lost, in order."""
        failing = [each for _, _, each in sorted(self._heap) if each.fails_on_loss]
        failing = [each for each in failing if not each.is_gone]
        for waiter in failing:
            self.leave(waiter)
        return failing

    @property
    def all_wait(self) -> bool:
        """Whether every open worker waits itself."""
        if self._num_idle != len(self.workers):
            return False
        return not any(worker.runs_elsewhere for worker in self.workers)

    def is_alone(self, worker: Worker) -> bool:
        """Whether this is the only open worker, and no others are announced."""
        is_only = len(self.workers) == 1 and worker in self.workers
        return is_only and self.opened >= (self.num_workers or 0)

    def _may_come(self) -> bool:
        """Whether some worker does not wait, or others are expected to open.

        With their number known, until that many have opened; else until one has closed.
        """
        if not self.all_wait:
            return True
        if self.opened < self.num_workers if self.num_workers else self.opened <= len(self.workers):
            return True
        # one that timed out, or that was stopped, has been woken and may still train
        return any(each.slot.is_woken for _, _, each in self._heap if not each.is_gone)

    def _find_next(self) -> None:
        while self._heap and self._heap[0][2].is_gone:
            heapq.heappop(self._heap)
            self._num_gone -= 1
        self.next_step = self._heap[0][0] if self._heap else math.inf

    def _take(self, waiter: Waiter, taken: list[Waiter]) -> None:
        if waiter.is_gone:
            self._num_gone -= 1
        else:
            self._forget(waiter)
            taken.append(waiter)

    def _forget(self, waiter: Waiter) -> None:
        # at once, not when its task runs: its worker may train from now on
        waiter.is_gone = True
        if waiter.worker is not None:
            self.set_idle(waiter.worker, False)
