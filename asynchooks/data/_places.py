"""Places: which items of a source are finished, where they finish out of order.

A place is the number of items before an item, since the first of all trainings that were restored
from one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from ._stage import saved_count


class Places:
    """The finished places, and those in batches that were given out, by the number of the batch."""

    def __init__(self) -> None:
        self.begin = 0  # of the first item that the source gives
        self.end = 0  # behind the last one that it has given
        self.frontier = 0  # all before it are finished
        self._beyond: set[int] = set()  # these behind it are, too
        self._batches: deque[list[int]] = deque()  # given out, and used perhaps
        self._kept: set[int] = set()
        self._num_trimmed = 0  # batches before them, which are finished

    def is_past(self, place: int) -> bool:
        """Whether the item is finished, or in a batch that was given out before the restore."""
        return place < self.frontier or place in self._beyond or place in self._kept

    def finish(self, place: int) -> None:
        self._beyond.add(place)

    def give_out(self, batch: list[int]) -> None:
        self._batches.append(batch)

    def keep(self, batch: list[int]) -> None:
        """A batch of before the restore is in use, and counts as given out."""
        self._kept.update(batch)
        self.give_out(batch)

    def trim(self, num_used: int) -> None:
        """So many batches are finished."""
        while self._num_trimmed < num_used and self._batches:
            self._beyond.update(self._batches.popleft())
            self._num_trimmed += 1
        self.frontier, self._beyond = self._advanced(self._beyond)

    def finished_with(self, num_used: int, used: Iterable[int]) -> tuple[int, set[int]]:
        """(Frontier, finished places behind it) if so many batches are finished, and these."""
        done = set(self._beyond)
        later = (number for number in used if number >= num_used)
        for number in {*range(self._num_trimmed, num_used), *later}:
            done.update(self._batches[number - self._num_trimmed])
        return self._advanced(done)

    def _advanced(self, done: set[int]) -> tuple[int, set[int]]:
        """(Frontier, the finished places behind it): the source knows its state up to its end."""
        frontier = self.frontier
        while frontier in done and frontier < self.end:
            done.remove(frontier)
            frontier += 1
        return frontier, done

    def load(self, state: Mapping[str, Any]) -> None:
        self.begin = self.end = self.frontier = saved_count(state["place"])
        self._beyond = {self.frontier + saved_count(each) for each in state["beyond"]}


def saved_places(frontier: int, beyond: set[int]) -> dict[str, Any]:
    """What `Places.load` takes: JSON."""
    return {"place": frontier, "beyond": sorted(place - frontier for place in beyond)}
