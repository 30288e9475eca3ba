"""TrainingEnd: what ends the wait of a session for its input."""

from __future__ import annotations

import math
from collections.abc import Callable

from .._engine.base import STOPPED, Slot
from .._engine.stop import Stop
from .._step.global_step import GlobalStep


class TrainingEnd(Stop):
    """What ends a consumer's wait: a stop, or the limit, which another worker may reach."""

    def __init__(self, stop: Stop, step: GlobalStep) -> None:
        self.stop = stop
        self._step = step
        self._forget: dict[Slot, Callable[[], None]] = {}

    @property
    def is_set(self) -> bool:  # type: ignore[override]
        return self.stop.is_set or self._step.is_at_limit

    @property
    def step(self) -> GlobalStep:
        """The step of the session that takes."""
        return self._step

    @property
    def training(self) -> object:
        """The training that ends, for comparison with others."""
        return self._step.gate

    def add(self, slot: Slot) -> None:
        self.stop.add(slot)
        limit = math.inf if self._step.limit is None else self._step.limit
        self._forget[slot] = self._step.gate.watch(slot, limit)
        if self.is_set:
            slot.wake(STOPPED)

    def discard(self, slot: Slot) -> None:
        self.stop.discard(slot)
        self._forget.pop(slot)()
