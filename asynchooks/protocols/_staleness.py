"""How stale the gradients were that made updates: a count for each staleness and worker."""

from __future__ import annotations

from typing import Any


class StalenessCounts:
    """Counts by (worker, staleness), and over all workers."""

    __slots__ = ("_by_worker", "_overall")

    def __init__(self, num_workers: int) -> None:
        self._overall: dict[int, int] = {}
        self._by_worker: list[dict[int, int]] = [{} for _ in range(num_workers)]

    def add(self, worker: int, staleness: int) -> None:
        overall, own = self._overall, self._by_worker[worker]
        overall[staleness] = overall.get(staleness, 0) + 1
        own[staleness] = own.get(staleness, 0) + 1

    def of(self, worker: int | None) -> dict[int, int]:
        """The counts of one worker, or of all, by staleness in rising order."""
        counts = self._overall if worker is None else self._by_worker[worker]
        return dict(sorted(counts.items()))

    def state(self) -> Any:
        """Rows of (worker, staleness, count): int64, shape (n, 3)."""
        import numpy as np

        rows = [
            (worker, staleness, count)
            for worker, counts in enumerate(self._by_worker)
            for staleness, count in sorted(counts.items())
        ]
        return np.array(rows, np.int64).reshape(-1, 3)

    def restore(self, rows: Any) -> None:
        self._overall.clear()
        for counts in self._by_worker:
            counts.clear()
        for worker, staleness, count in rows.tolist():
            self._by_worker[worker][staleness] = count
            self._overall[staleness] = self._overall.get(staleness, 0) + count
