"""Who waits for which global step, and whether it can still come.

A state machine without locks and without waiting: `GlobalStep` holds its lock around every call
and wakes whom it is given.
"""

from __future__ import annotations

import heapq

from ._engine import Slot


class Worker:
    """One open session, as a global step sees it: it may still move the step."""

    __slots__ = ("waits",)

    def __init__(self) -> None:
        self.waits = 0  # its waits in `before_run`: while there is one, it moves no step


class Waiter:
    """One task that waits for a step; `worker` is its session if it trains only afterwards."""

    __slots__ = ("is_gone", "order", "slot", "step", "worker")

    def __init__(self, step: int, order: int, slot: Slot, worker: Worker | None) -> None:
        self.step = step
        self.order = order
        self.slot = slot
        self.worker = worker
        self.is_gone = False

    def __lt__(self, other: Waiter) -> bool:
        return (self.step, self.order) < (other.step, other.order)


class Waiters:
    """The waiters by (step, order of asking), and the workers that may bring the step."""

    __slots__ = (
        "_heap", "_num_gone", "_num_idle", "_order", "is_closed", "num_workers", "opened",
        "workers",
    )  # fmt: skip

    def __init__(self, num_workers: int | None) -> None:
        self._heap: list[Waiter] = []
        self._num_gone = 0  # left, but still in the heap: taking one out would cost a scan
        self._num_idle = 0  # open workers that wait themselves
        self._order = 0
        self.num_workers = num_workers
        self.opened = 0
        self.workers: set[Worker] = set()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def open(self, worker: Worker) -> None:
        self.opened += 1
        self.workers.add(worker)

    def close(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            self._num_idle -= worker.waits > 0

    def add(self, step: int, slot: Slot, worker: Worker | None) -> Waiter:
        waiter = Waiter(step, self._order, slot, worker)
        self._order += 1
        heapq.heappush(self._heap, waiter)
        if worker is not None:
            worker.waits += 1
            self._num_idle += worker.waits == 1 and worker in self.workers
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """The waiter waits no more, whether it was woken or not; once for each `add`."""
        worker = waiter.worker
        if worker is not None:
            worker.waits -= 1
            self._num_idle -= worker.waits == 0 and worker in self.workers
        if waiter.is_gone:
            return
        waiter.is_gone = True
        self._num_gone += 1
        if self._num_gone > len(self._heap) // 2:
            self._heap = [each for each in self._heap if not each.is_gone]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def take_due(self, value: int) -> list[Waiter]:
        """Take out those whose step is reached, in order."""
        due: list[Waiter] = []
        while self._heap and self._heap[0].step <= value:
            self._take(heapq.heappop(self._heap), due)
        return due

    def take_lost(self, newcomer: Waiter | None = None) -> list[Waiter]:
        """Take out those whose step can no longer come, in order, after a change.

        Args:
            newcomer: the waiter that was just added, if that was the change; None if a worker
                closed.
        """
        if self.is_closed or self.num_workers is not None:
            if not (self.is_closed or self._nobody_moves()):
                return []
        elif len(self.workers) > 1 or (newcomer is not None and not self._is_alone(newcomer)):
            return []  # and asking each waiter would make adding 10,000 of them quadratic
        lost: list[Waiter] = []
        kept: list[Waiter] = []
        for waiter in self._heap:
            if waiter.is_gone or self.is_closed or self.num_workers or self._is_alone(waiter):
                self._take(waiter, lost)
            else:
                kept.append(waiter)
        self._heap = kept
        heapq.heapify(kept)
        return sorted(lost)

    def _nobody_moves(self) -> bool:
        """All that were announced have opened, and those that are still open all wait."""
        return self.opened >= (self.num_workers or 0) and self._num_idle == len(self.workers)

    def _is_alone(self, waiter: Waiter) -> bool:
        """Without a number known: somebody else had opened, and everybody else has closed."""
        others_opened = self.opened - (waiter.worker is not None)
        return others_opened > 0 and not self.workers - {waiter.worker}

    def _take(self, waiter: Waiter, taken: list[Waiter]) -> None:
        if waiter.is_gone:
            self._num_gone -= 1
        else:
            waiter.is_gone = True
            taken.append(waiter)
