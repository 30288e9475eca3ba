"""The finished steps of each worker, and the smallest of them without a scan. It waits for nobody.

Source: the clocks of Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Clocks:
    """One clock for each worker; those that have left hold the slowest back no more."""

    __slots__ = ("_num_at", "left", "slowest", "values")

    def __init__(self, num_workers: int) -> None:
        self.values = [0] * num_workers
        self.left: set[int] = set()
        # how many of those present stand at a clock; the smallest key is `slowest`, unless all
        # have left
        self._num_at: dict[int, int] = {0: num_workers}
        self.slowest = 0

    @property
    def num_present(self) -> int:
        return len(self.values) - len(self.left)

    def is_present(self, worker: int) -> bool:
        return worker not in self.left

    def tick(self, worker: int) -> bool:
        """A worker has finished a step; returns whether the slowest has moved by that."""
        clock = self.values[worker]
        self.values[worker] = clock + 1
        if worker in self.left:
            return False
        num_at = self._num_at
        num_at[clock + 1] = num_at.get(clock + 1, 0) + 1
        return self._take_out(clock)

    def leave(self, worker: int) -> bool:
        """A worker has left; returns whether the slowest has moved by that."""
        if worker in self.left:
            return False
        self.left.add(worker)
        return self._take_out(self.values[worker])

    def join(self, worker: int) -> None:
        """A worker that had left is back, no further behind than the slowest.

        When all had left, all are expected again, and begin side by side.
        """
        if worker not in self.left:
            return
        if self.num_present == 0:
            self.left.clear()
            self.values = [max(self.values)] * len(self.values)
            self._count()
        else:
            self.left.remove(worker)
            clock = self.values[worker] = max(self.values[worker], self.slowest)
            self._num_at[clock] = self._num_at.get(clock, 0) + 1

    def restore(self, values: Iterable[int]) -> None:
        """Take up other clocks; who is present stays as it is."""
        self.values = [int(value) for value in values]
        self._count()

    def _count(self) -> None:
        present = [value for worker, value in enumerate(self.values) if worker not in self.left]
        self._num_at = dict(Counter(present))
        self.slowest = min(present, default=max(self.values))

    def _take_out(self, clock: int) -> bool:
        num_at = self._num_at
        num = num_at[clock] - 1
        if num:
            num_at[clock] = num
            return False
        del num_at[clock]
        if clock != self.slowest or not num_at:
            return False
        while self.slowest not in num_at:  # as many turns in all as the slowest has made steps
            self.slowest += 1
        return True
