"""The finished steps of each worker, and the smallest of them without a scan. Nothing here waits.

Source: the clocks of Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Clocks:
    """One clock for each worker; those that have left no longer count for the slowest."""

    __slots__ = ("left", "num_at", "slowest", "values")

    def __init__(self, num_workers: int) -> None:
        self.values = [0] * num_workers
        self.left: set[int] = set()
        # how many present workers have a clock; the smallest key is `slowest`, unless all have left
        self.num_at: dict[int, int] = {0: num_workers}
        self.slowest = 0

    @property
    def num_present(self) -> int:
        return len(self.values) - len(self.left)

    def tick(self, worker: int) -> bool:
        """Count a finished step of a worker; returns whether this has moved the slowest."""
        clock = self.values[worker]
        self.values[worker] = clock + 1
        if worker in self.left:
            return False
        num_at = self.num_at
        num_at[clock + 1] = num_at.get(clock + 1, 0) + 1
        return self._take_out(clock)

    def leave(self, worker: int) -> bool:
        """Remove a worker; returns whether this has moved the slowest."""
        if worker in self.left:
            return False
        self.left.add(worker)
        return self._take_out(self.values[worker])

    def join(self, worker: int) -> None:
        """Add a worker that had left, at its own clock or the slowest, whichever is later.

        When all had left, all are present again, at one clock.
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
            self.num_at[clock] = self.num_at.get(clock, 0) + 1

    def restore(self, values: Iterable[int]) -> None:
        """Replace the clocks; the workers that are present stay so."""
        self.values = [int(value) for value in values]
        self._count()

    def _count(self) -> None:
        present = [value for worker, value in enumerate(self.values) if worker not in self.left]
        self.num_at = dict(Counter(present))
        self.slowest = min(present, default=max(self.values))

    def _take_out(self, clock: int) -> bool:
        num_at = self.num_at
        num = num_at[clock] - 1
        if num:
            num_at[clock] = num
            return False
        del num_at[clock]
        if clock != self.slowest or not num_at:
            return False
        while self.slowest not in num_at:  # in total, as many turns as the slowest has made steps
            self.slowest += 1
        return True
