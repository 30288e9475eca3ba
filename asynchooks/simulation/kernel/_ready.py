"""Ready: which of the tasks that an event loop could run goes on next, where ties are shuffled.

Tasks that asynchooks wakes are entries of the heap, and are chosen there. Those that the event loop
wakes itself, at an event of anyio, come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Ready(Generic[T]):
    """Steps of tasks that can be made now; one of them at a time is chosen. A kernel makes it.

    Args:
        choose: the kernel's `choose_next`.
        number_of: of the task that makes a step, in order of starting: event loops hand tasks over
            in orders of their own, such as that of a set.
    """

    def __init__(self, choose: Callable[[Sequence[T]], int], number_of: Callable[[T], int]) -> None:
        self._choose, self._number_of = choose, number_of
        self._steps: list[T] = []
        self.left_of_round = 0
        """Steps until as many are made as there were at its beginning, as in an event loop."""

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, steps: Iterable[T]) -> None:
        """Further steps can be made."""
        self._steps += sorted(steps, key=self._number_of)

    def take(self) -> T:
        """Choose one of them, and take it out."""
        if self.left_of_round == 0:
            self.left_of_round = len(self._steps)
        self.left_of_round -= 1
        return self._steps.pop(self._choose(self._steps))
