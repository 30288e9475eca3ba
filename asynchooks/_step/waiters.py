"""Who waits for which global step, and whether it can still come.

A state machine without locks and without waiting: `StepRuns` holds its lock around every call
and wakes whom it is given.
"""

from __future__ import annotations

import heapq
import math

from ._engine import Slot
from ._step_source import SourceState


class Worker:
    """One open session, as a global step sees it: it may still move the step."""

    __slots__ = ("waits",)

    def __init__(self) -> None:
        self.waits = 0  # its waits in `before_run`: while there is one, it moves no step


class Waiter:
    """One task that waits for a step; `worker` is its session if it trains only afterwards."""

    __slots__ = ("fails_on_loss", "is_gone", "slot", "worker")

    def __init__(self, slot: Slot, worker: Worker | None) -> None:
        self.slot = slot
        self.worker = worker
        self.fails_on_loss = False
        self.is_gone = False


class Waiters:
    """The waiters by (step, order of asking), and the workers that may bring the step."""

    __slots__ = (
        "_heap", "_num_gone", "_num_idle", "_order", "is_closed", "next_step", "num_workers",
        "of_limit", "opened", "source_state", "workers",
    )  # fmt: skip

    def __init__(self, num_workers: float | None) -> None:
        self._heap: list[tuple[int, int, Waiter]] = []  # by step, then order of asking
        self.next_step = math.inf  # no waiter is due below it: the one thing that each run asks
        self._num_gone = 0  # left, but still in the heap: taking one out would cost a scan
        self._num_idle = 0  # open workers that wait themselves
        self._order = 0
        self.of_limit: list[Slot] = []  # of those who ask for the limit
        self.num_workers = num_workers
        self.opened = 0
        self.workers: set[Worker] = set()
        self.is_closed = False
        self.source_state: SourceState | None = None  # of who brings news of other processes

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def open(self, worker: Worker) -> None:
        if not self.workers and self.opened >= (self.num_workers or math.inf):
            self.opened = 0  # all that were announced have come and gone: a new round
        self.opened += 1
        self.workers.add(worker)

    def close(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            self._num_idle -= worker.waits > 0

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
            worker.waits += 1
            self._num_idle += worker.waits == 1 and worker in self.workers
        return waiter

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

    def take_lost(self) -> list[Waiter]:
        """Take out all, in order, if their steps can no longer come; after every change."""
        is_closed = self.is_closed or self.source_state is SourceState.CLOSED
        if not (is_closed or self._nobody_moves()):
            return []
        lost: list[Waiter] = []
        for _, _, waiter in sorted(self._heap):
            self._take(waiter, lost)
        self._heap.clear()
        self._find_next()
        return lost

    def take_told(self) -> list[Waiter]:
        """Take out those who asked to be told when no news arrives any more, in order."""
        told: list[Waiter] = []
        for _, _, waiter in sorted(self._heap):
            if waiter.fails_on_loss and not waiter.is_gone:
                told.append(waiter)
                self.leave(waiter)
        return told

    @property
    def all_wait(self) -> bool:
        """Whether every open worker waits itself."""
        return self._num_idle == len(self.workers)

    def _nobody_moves(self) -> bool:
        """Whether all open workers wait, and no others are to be expected.

        With their number known, once that many have opened; else once somebody else has closed.
        """
        if not self.all_wait:
            return False
        if self.opened < self.num_workers if self.num_workers else self.opened <= len(self.workers):
            return False
        # one whose time ran out, or that was told to stop, has been woken and may still train
        return not any(each.slot.is_woken for _, _, each in self._heap if not each.is_gone)

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
            waiter.worker.waits -= 1
            self._num_idle -= waiter.worker.waits == 0 and waiter.worker in self.workers
