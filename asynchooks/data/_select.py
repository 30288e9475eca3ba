"""Stages that give a part of their source: take and shard."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Any

from .. import _check as check
from .._errors import InputStateError
from ._division import Bounds, data_of
from ._sources import Source, stage_of
from ._stage import Mark, Pair, Stage, State, T, saved_count


def take(source: Source[T], count: int) -> Stage[T]:
    """The first `count` items; no more are read.

    Args:
        source: see `asynchooks.data`.
        count: >= 0.

    Example:
        assert [item async for item in take(range(100), 3)] == [0, 1, 2]
    """
    count = check.integer("count", count, least=0)
    return Take(stage_of(source), count)


def shard(source: Source[T], num_shards: int, index: int) -> Stage[T]:
    """Every `num_shards`-th item, from the item `index` on: one worker's part.

    Where the ranks of a `DistributedCheckpointSaver` divide a source, another number of them can
    resume: they begin where the first of the former ranks was, pass over what was used, and divide
    the rest, so that each item is used once a pass. Below stages that hide which items went into
    which (`take`, `unbatch` and those of several sources) it keeps its position, and is not divided
    again.

    Args:
        source: see `asynchooks.data`; the same for all.
        num_shards: >= 1.
        index: in [0, num_shards).

    Example:
        assert [item async for item in shard(range(6), num_shards=3, index=1)] == [1, 4]
    """
    num_shards = check.integer("num_shards", num_shards, least=1)
    index = check.integer("index", index, least=0)
    if index >= num_shards:
        raise ValueError(f"index is {index!r} of {num_shards} shards; give 0 to {num_shards - 1}")
    return Shard(stage_of(source), num_shards, index)


class Take(Stage[Any]):
    kind = "take"

    def __init__(self, source: Stage[Any], count: int) -> None:
        super().__init__(source)
        self._count = count

    def _set(self, state: State | None) -> None:
        self._num_taken = 0 if state is None else saved_count(state["taken"])

    def _at_first(self) -> dict[str, Any]:
        return {"taken": 0}

    def _is_divided(self) -> bool:
        return False  # what it would take of another part is not known

    async def _pull(self, limit: int) -> Sequence[Pair]:
        num, left = self._num_taken, self._count - self._num_taken
        pairs = await self._sources[0]._read(min(limit, left)) if left > 0 else ()
        self._num_taken += len(pairs)
        return [
            (item, (self, {"taken": taken}, mark))
            for taken, (item, mark) in enumerate(pairs, num + 1)
        ]


class Shard(Stage[Any]):
    kind = "shard"

    def __init__(self, source: Stage[Any], num_shards: int, index: int) -> None:
        super().__init__(source)
        self._num_shards = num_shards
        self._index = index
        self._divided: list[tuple[int, list[Bounds]]] = []
        """How it was divided before, until all that was used then is passed over: the items that
        came so far in this pass, by modulo, and what each shard had used of its own."""

    def _set(self, state: State | None) -> None:
        state = self._at_first() if state is None else state
        found, own = list(state["shard"]), [self._index, self._num_shards]
        if found != own:
            raise InputStateError(
                f"the state is that of shard {found[0]} of {found[1]}, and this is {own[0]} of "
                f"{own[1]}; other shards would lose items or repeat them. Give the shard that was "
                "saved. Workers of one process need none: let them share one stage"
            )
        self._num_to_pass = saved_count(state["to_pass"])
        self._num_in = saved_count(state["at"][-1])
        self._divided = [(saved_count(num), used) for num, used in state["divided"]]
        self._forget_used([*self._epoch, self._num_in])

    def _at_first(self) -> dict[str, Any]:
        return self._data(self._index, 0, [(0, used) for _, used in self._divided])

    def _data(self, num_to_pass: int, num_in: int, divided: Sequence[Any]) -> dict[str, Any]:
        return {
            "shard": [self._index, self._num_shards],
            "to_pass": num_to_pass,
            "at": [*self._epoch, num_in],
            "divided": divided,
        }

    async def _pull(self, limit: int) -> Sequence[Pair]:
        while pairs := await self._sources[0]._read(self._num_to_pass + 1):
            left = pairs
            if self._divided:
                places = enumerate(pairs, self._num_in)
                left = [pair for num_in, pair in places if self._is_left([*self._epoch, num_in])]
            self._num_in += len(pairs)
            if len(left) > self._num_to_pass:
                item, mark = left[-1]
                self._num_to_pass = self._num_shards - 1
                data = self._data(self._num_to_pass, self._num_in, list(self._divided))
                return ((item, (self, data, mark)),)
            self._num_to_pass -= len(left)
        return ()

    def _is_left(self, place: list[int]) -> bool:
        """Whether none of the former shards has used the next item."""
        self._forget_used(place)
        for number, (num, used) in enumerate(self._divided):
            self._divided[number] = (num + 1) % len(used), used
            if bisect(used[num], place) % 2:
                return False
        return True

    def _forget_used(self, place: list[int]) -> None:
        """Forget how it was divided, if nothing from there on was used."""
        if all(bounds[-1:] <= [place] for _, used in self._divided for bounds in used):
            self._divided = []

    def _is_divided(self) -> bool:
        return True

    def _bounds_between(self, before: Mark, data: Any, below: Mark) -> Bounds:
        return [[] if before is None else data_of(before)["at"], data["at"]]
