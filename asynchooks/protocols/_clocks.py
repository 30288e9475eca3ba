"""The finished steps of each worker, and the smallest of them without a scan. Nothing here waits.

Source: the clocks of Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Clocks:
    """One clock for each worker; those that have left no longer count for the slowest.

    The slowest is kept up only after it was first asked for: most protocols never do.
    """

    __slots__ = ("_slowest", "left", "num_at", "values")

    def __init__(self, num_workers: int) -> None:
        self.values = [0] * num_workers
        self.left: set[int] = set()
        # how many present workers have a clock, in which the slowest is the smallest key as long
        # as one is present; None until the slowest was asked for
        self.num_at: dict[int, int] | None = None
        self._slowest = 0

    @property
    def num_present(self) -> int:
        return len(self.values) - len(self.left)

    @property
    def slowest(self) -> int:
        """The clock of the slowest worker that is present; the last one's, if all have left."""
        if self.num_at is None:
            self._count()
        return self._slowest

    def tick(self, worker: int) -> bool:
        """Count a finished step of a worker; returns whether this has moved the slowest.

        Nobody can wait for the slowest before it was asked for: then it returns False.
        """
        clock = self.values[worker]
        self.values[worker] = clock + 1
        num_at = self.num_at
        if num_at is None or worker in self.left:
            return False
        num_at[clock + 1] = num_at.get(clock + 1, 0) + 1
        return self._take_out(num_at, clock)

    def leave(self, worker: int) -> bool:
        """Remove a worker; returns whether this has moved the slowest, as `tick` does."""
        if worker in self.left:
            return False
        if self.num_present == 1 and self.num_at is None:
            self._count()  # while there is one
        self.left.add(worker)
        return self.num_at is not None and self._take_out(self.num_at, self.values[worker])

    def join(self, worker: int) -> None:
        """Add a worker that had left, at its own clock or the slowest, whichever is later.

        When all had left, all are present again, at one clock.
        """
        if worker not in self.left:
            return
        if self.num_present == 0:
            self.left.clear()
            self.values = [max(self.values)] * len(self.values)
            self.num_at = None
        else:
            clock = self.values[worker] = max(self.values[worker], self.slowest)
            self.left.remove(worker)
            if self.num_at is not None:
                self.num_at[clock] = self.num_at.get(clock, 0) + 1

    def restore(self, values: Iterable[int]) -> None:
        """Replace the clocks; the workers that are present stay so."""
        self.values = [int(value) for value in values]
        self.num_at = None

    def _count(self) -> None:
        present = [value for worker, value in enumerate(self.values) if worker not in self.left]
        self.num_at = dict(Counter(present))
        self._slowest = min(present, default=max(self.values))

    def _take_out(self, num_at: dict[int, int], clock: int) -> bool:
        num = num_at[clock] - 1
        if num:
            num_at[clock] = num
            return False
        del num_at[clock]
        slowest = self._slowest
        if clock != slowest or not num_at:
            return False
        while slowest not in num_at:  # in total, as many turns as the slowest has made steps
            slowest += 1
        self._slowest = slowest
        return True
