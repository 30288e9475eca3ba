"""Position: which items of a training's input are finished, in whatever order they finish.

A place is the number of items before an item, since the first of all trainings that were restored
from one another. So a place means the same item in every checkpoint of a training.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from ._division import Bounds, bounds_between


class Position:
    """All items before the frontier are finished, and some behind it.

    Args:
        mark: says how to go on at the frontier; see `_stage`.
        place: where the frontier is.
        finished: places behind it that are finished, too.
        used: over a shard, which items of its source are used by those in `finished`.
        is_loaded: whether it is a saved one.
    """

    def __init__(
        self,
        mark: Any,
        place: int = 0,
        finished: Sequence[int] = (),
        used: Sequence[Bounds] = (),
        *,
        is_loaded: bool = False,
    ) -> None:
        self.is_loaded = is_loaded
        self.last_mark = mark  # of the last item that the source has given
        self.in_hand: set[int] = set()
        """Places of items that loops kept when the input went back: the source gives them once
        more, and no consumer is to get them."""
        self.counts = Counter[str]()
        """Of items that were finished without being used, by the reason."""
        self.num_batches = 0  # that rollouts made of items, and that were used
        self._mark = mark  # at the frontier
        self._frontier = place
        self._marks: deque[Any] = deque()  # behind each item from the frontier on
        self._finished = set(finished)  # places that are not before the frontier
        self._used = dict(zip(finished, used, strict=False))  # until the source gives them again

    @property
    def end(self) -> int:
        """The place of the next item that the source gives."""
        return self._frontier + len(self._marks)

    def add(self, mark: Any) -> int | None:
        """The place of an item that the source has given; None if no consumer is to get it."""
        place = self.end
        self._marks.append(mark)
        self.last_mark = mark
        if place in self._finished:
            self.finish(())
        elif place in self.in_hand:
            self.in_hand.discard(place)
        else:
            return place
        return None

    def add_finished(self, mark: Any) -> bool:
        """Count an item that is used at once; False if no consumer is to get it."""
        if self._marks or self._finished or self.in_hand:
            place = self.add(mark)
            if place is None:
                return False
            self.finish((place,))
        else:
            self._frontier += 1
            self._mark = self.last_mark = mark
        return True

    def is_finished(self, place: int) -> bool:
        return place < self._frontier or place in self._finished

    def finish(self, places: Iterable[int]) -> None:
        """Items were used, or given up for good."""
        finished = self._finished
        for place in places:
            if place >= self._frontier:
                finished.add(place)
        while self._marks and self._frontier in finished:
            finished.remove(self._frontier)
            self._frontier += 1
            self._mark = self._marks.popleft()

    def after(self, places: Iterable[int] = ()) -> tuple[int, Any, list[int]]:
        """(Frontier, its mark, places behind it that are finished) if these items are finished."""
        finished, frontier, mark = self._finished.union(places), self._frontier, self._mark
        for behind in self._marks:
            if frontier not in finished:
                break
            frontier, mark = frontier + 1, behind
        return frontier, mark, sorted(place for place in finished if place >= frontier)

    def used(self, places: Iterable[int]) -> list[Bounds]:
        """Over a shard: which items of its source are used by each, none before the frontier."""
        marks = [self._mark, *self._marks]
        return [
            bounds_between(*marks[place - self._frontier :][:2])
            if place < self.end
            else self._used.get(place, [])
            for place in places
        ]
