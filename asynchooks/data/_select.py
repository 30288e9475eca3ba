"""Stages that choose what to read next: take, shard and interleave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from .. import _check as check
from .._errors import InputStateError
from ._sources import Source, stage_of
from ._stage import Epoch, Mark, Pair, Stage, State, T, no_epoch, saved_count, state_of


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

    Args:
        source: see `asynchooks.data`.
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

    Example:
        assert [item async for item in interleave([[1, 3, 5], [2, 4]])] == [1, 2, 3, 4, 5]
    """
    if not isinstance(sources, Iterable):
        raise TypeError(f"interleave got {sources!r}; give several sources: interleave([a, b])")
    stages = [stage_of(each) for each in sources]
    if not stages:
        raise ValueError("interleave got no sources; give at least one")
    return Interleave(*stages)


class Take(Stage[Any]):
    kind = "take"

    def __init__(self, source: Stage[Any], count: int) -> None:
        super().__init__(source)
        self._count = count

    def _set(self, state: State | None) -> None:
        self._num_taken = 0 if state is None else saved_count(state["taken"])

    def _at_first(self) -> dict[str, Any]:
        return {"taken": 0}

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

    def _set(self, state: State | None) -> None:
        state = self._at_first() if state is None else state
        found, own = list(state["shard"]), [self._index, self._num_shards]
        if found != own:
            raise InputStateError(
                f"the state is that of shard {found[0]} of {found[1]}, and this is {own[0]} of "
                f"{own[1]}; other shards would lose items or repeat them"
            )
        self._num_to_pass = saved_count(state["to_pass"])

    def _at_first(self) -> dict[str, Any]:
        return self._with_to_pass(self._index)

    def _with_to_pass(self, num: int) -> dict[str, Any]:
        return {"shard": [self._index, self._num_shards], "to_pass": num}

    async def _pull(self, limit: int) -> Sequence[Pair]:
        while pairs := await self._sources[0]._read(self._num_to_pass + 1):
            if len(pairs) > self._num_to_pass:
                item, mark = pairs[-1]
                self._num_to_pass = self._num_shards - 1
                return ((item, (self, self._with_to_pass(self._num_to_pass), mark)),)
            self._num_to_pass -= len(pairs)
        return ()


class Interleave(Stage[Any]):
    kind = "interleave"

    def _begin_sources(self, state: State | None, epoch: Epoch) -> None:
        states = [None] * len(self._sources) if state is None else state["sources"]
        for each, saved in zip(self._sources, states, strict=True):
            each._begin(saved, epoch)

    def _set(self, state: State | None) -> None:
        self._next = 0 if state is None else saved_count(state["next"]) % len(self._sources)
        self._has_ended = [False] * len(self._sources)
        self._marks: list[Mark] = [each._origin() for each in self._sources]

    def _origin(self) -> Mark:
        if self._loaded is not None:
            return self._loaded
        return self, 0, [each._origin() for each in self._sources]

    async def _pull(self, limit: int) -> Sequence[Pair]:
        while not all(self._has_ended):
            place = self._next
            pairs = () if self._has_ended[place] else await self._sources[place]._read(1)
            self._has_ended[place] = not pairs
            self._next = (place + 1) % len(self._sources)
            if pairs:
                item, self._marks[place] = pairs[0]
                return ((item, (self, self._next, list(self._marks))),)
        return ()

    def _state_of(self, data: int, below: list[Mark]) -> dict[str, Any]:
        return {"next": data, "sources": [state_of(each) for each in below]}

    def _epoch_of(self, data: int, below: list[Mark]) -> int:
        raise no_epoch(self)
