"""interleave: several sources in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from ._arguments import saved_count
from ._sources import Source, stage_of
from ._stage import Stage, T


@overload
def interleave(sources: Iterable[Source[T]]) -> Stage[T]: ...
@overload
def interleave(sources: Iterable[Any]) -> Stage[Any]: ...  # of sources that are not alike
def interleave(sources: Iterable[Any]) -> Stage[Any]:
    """One item of each source in turn, in their order; one that has ended is left out.

    It reads when it is asked, from one source at a time: give it `prefetch` stages to have all of
    them work at once.

    Args:
        sources: as in `asynchooks.data`; at least one.
    """
    if not isinstance(sources, Iterable):
        raise TypeError(f"interleave got {sources!r}; give several sources: interleave([a, b])")
    stages = [stage_of(each) for each in sources]
    if not stages:
        raise ValueError("interleave got no sources; give at least one")
    return Interleave(stages)


class Interleave(Stage[Any]):
    kind = "interleave"

    def __init__(self, sources: Sequence[Stage[Any]]) -> None:
        super().__init__(*sources)
        self._next = 0  # whose turn it is
        self._has_ended = [False] * len(sources)
        self._nums_in = [0] * len(sources)
        self._log: deque[int] = deque()  # which source each item came from, since those kept

    async def _pull(self, limit: int) -> Sequence[Any]:
        while not all(self._has_ended):
            place = self._next
            if not self._has_ended[place]:
                items = await self._sources[place]._read(1)
                if items:
                    self._log.append(place)
                    self._nums_in[place] += 1
                    self._next = (place + 1) % len(self._sources)
                    return items
                self._has_ended[place] = True
            self._next = (place + 1) % len(self._sources)
        return ()

    def _anew(self, sources: Sequence[Stage[Any]]) -> Stage[Any]:
        return Interleave(sources)

    def _nums_at(self, num_out: int) -> tuple[int, list[int]]:
        """Whose turn it was, and how many items each source had given, behind that many items."""
        nums, since = list(self._nums_in), len(self._log) - (self._num_out - num_out)
        for place in list(self._log)[since:]:
            nums[place] -= 1
        return self._log[since] if num_out < self._num_out else self._next, nums

    def _state_at(self, num_out: int) -> dict[str, Any]:
        turn, nums = self._nums_at(num_out)
        sources = [each._described(num) for each, num in zip(self._sources, nums, strict=True)]
        return {"next": turn, "sources": sources}

    def _load(self, state: Mapping[str, Any]) -> None:
        for each, saved in zip(self._sources, state["sources"], strict=True):
            each._load_described(saved)
        self._next = saved_count(state["next"]) % len(self._sources)

    def _keep(self, num_out: int) -> None:
        if self._num_out - num_out > len(self._log):  # another reader is farther
            return
        _, nums = self._nums_at(num_out)
        while len(self._log) > self._num_out - num_out:
            self._log.popleft()
        for each, num in zip(self._sources, nums, strict=True):
            each._keep(num)
