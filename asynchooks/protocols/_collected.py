"""Gradients that wait for more, to make one update together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Gradient(NamedTuple):
    """One gradient, by whom, and the version that it was computed at."""

    worker: int
    version: int
    value: Any


class Collected:
    """They are kept apart until the update, so that its bits do not depend on who came first."""

    __slots__ = ("gradients", "workers")

    def __init__(self) -> None:
        self.gradients: list[Gradient] = []
        self.workers: set[int] = set()

    def __len__(self) -> int:
        return len(self.gradients)

    def add(self, gradient: Gradient) -> None:
        self.gradients.append(gradient)
        self.workers.add(gradient.worker)

    def remove_last(self) -> None:
        self.gradients.pop()
        self.workers = {each.worker for each in self.gradients}

    def in_order(self) -> list[Gradient]:
        """By worker; those of one worker as they came."""
        return sorted(self.gradients, key=lambda each: each.worker)

    def state(self) -> list[dict[str, Any]]:
        return [each._asdict() for each in self.gradients]

    def restore(self, saved: list[Any], checked: Callable[[str, Any], Any]) -> None:
        for each in saved:
            value = checked("a saved gradient", each["value"])
            self.add(Gradient(int(each["worker"]), int(each["version"]), value))
