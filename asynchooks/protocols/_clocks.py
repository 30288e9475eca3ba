"""The finished steps of each worker, and the smallest of them without a scan. Nothing here waits.

Source: the clocks of Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Clocks:
    """One clock for each worker; those that have left no longer count for the slowest."""

    __slots__ = ("_num_at", "left", "slowest", "values")

    def __init__(self, num_workers: int) -> None:
        self.left: set[int] = set()
        self.restore([0] * num_workers)

    @property
    def num_present(self) -> int:
        return len(self.values) - len(self.left)

    def restore(self, values: Iterable[int]) -> None:
        """Replace the clocks; the workers that are present stay so."""
        self.values = [int(value) for value in values]
        self._count()

    def tick(self, worker: int) -> bool:
        """Count a finished step of a worker; returns whether this has moved the slowest."""
        clock = self.values[worker]
        self.values[worker] = clock + 1
        if worker in self.left:
            return False
        self._num_at[clock + 1] += 1
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
        else:
            self.left.remove(worker)
            self.values[worker] = max(self.values[worker], self.slowest)
        self._count()

    def _count(self) -> None:
        present = [value for worker, value in enumerate(self.values) if worker not in self.left]
        # how many present workers have a clock; the slowest is the smallest key with any
        self._num_at = Counter(present)
        self.slowest = min(present, default=max(self.values))
        """The clock of the slowest worker that is present; the last one's, if all have left."""

    def _take_out(self, clock: int) -> bool:
        num_at, slowest = self._num_at, self.slowest
        num_at[clock] -= 1
        if clock != slowest or num_at[clock] or not self.num_present:
            return False
        while not num_at[slowest]:  # in total, as many turns as the slowest has made steps
            del num_at[slowest]
            slowest += 1
        self.slowest = slowest
        return True
