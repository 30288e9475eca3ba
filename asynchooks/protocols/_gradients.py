"""Gradients at a parameter server: outcomes of pushes, collected gradients, staleness counts."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any, NamedTuple

import numpy as np


class Snapshot(NamedTuple):
    """The parameters as they were pulled, and the number of updates that made them.

    The arrays are the server's own, for reading only: it never changes them, an update makes new
    ones.

    Example:
        server = ParameterServer(np.zeros(3), Asynchronous(), num_workers=1, learning_rate=0.1)
        snapshot = server.pull(0)
        assert snapshot.version == 0 and snapshot.parameters.shape == (3,)
    """

    parameters: Any
    version: int


class Outcome(Enum):
    """What a push did with its gradient.

    Example:
        server = ParameterServer(np.zeros(3), Asynchronous(), num_workers=1, learning_rate=0.1)
        snapshot = server.pull(0)
        pushed = server.push(0, np.ones(3), snapshot.version)
        assert pushed.outcome is Outcome.APPLIED
    """

    APPLIED = "applied"
    """It made an update, with those that were collected before."""
    COLLECTED = "collected"
    """It is kept until there are enough gradients for an update."""
    DISCARDED = "discarded"
    """It is dropped: too stale for the protocol, or training is over."""


class Pushed(NamedTuple):
    """The outcome of a push, and the staleness of its gradient.

    `staleness` is the number of updates between the pull and the update that the gradient is part
    of, or that it came too late for. It is below 0 for a version that a restore has undone.

    Example:
        server = ParameterServer(np.zeros(3), Asynchronous(), num_workers=1, learning_rate=0.1)
        snapshot = server.pull(0)
        pushed = server.push(0, np.ones(3), snapshot.version)
        assert pushed.is_applied and pushed.staleness == 0
    """

    outcome: Outcome
    staleness: int

    @property
    def is_applied(self) -> bool:
        """Whether it made an update."""
        return self.outcome is Outcome.APPLIED

    @property
    def is_collected(self) -> bool:
        """Whether it waits for further gradients."""
        return self.outcome is Outcome.COLLECTED

    @property
    def is_discarded(self) -> bool:
        """Whether it was dropped."""
        return self.outcome is Outcome.DISCARDED


class Gradient(NamedTuple):
    """One gradient, its worker, and the version that it was computed at."""

    worker: int
    version: int
    value: Any


class StalenessCounts:
    """How many gradients made updates, by worker and staleness."""

    __slots__ = ("by_worker",)

    def __init__(self, num_workers: int) -> None:
        self.by_worker: list[dict[int, int]] = [{} for _ in range(num_workers)]

    def add(self, worker: int, staleness: int) -> None:
        counts = self.by_worker[worker]
        counts[staleness] = counts.get(staleness, 0) + 1

    def of(self, worker: int | None) -> dict[int, int]:
        """The counts of one worker, or of all, by staleness in rising order."""
        if worker is not None:
            return dict(sorted(self.by_worker[worker].items()))
        total: Counter[int] = Counter()
        for counts in self.by_worker:
            for staleness, count in counts.items():
                total[staleness] += count
        return dict(sorted(total.items()))

    def state(self) -> Any:
        """Rows of (worker, staleness, count): int64, shape (n, 3)."""
        rows = [
            (worker, staleness, count)
            for worker, counts in enumerate(self.by_worker)
            for staleness, count in sorted(counts.items())
        ]
        return np.array(rows, np.int64).reshape(-1, 3)

    def restore(self, rows: Any) -> None:
        for counts in self.by_worker:
            counts.clear()
        for worker, staleness, count in rows.tolist():
            self.by_worker[worker][staleness] = count
