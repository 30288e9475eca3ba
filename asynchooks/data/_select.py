"""Stages that choose what to read next: take, shard and interleave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from .. import _check as check
from .._errors import InputStateError
from ._sources import Source, stage_of
from ._stage import Stage, T, saved_count


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
        super().__init__(source, args=(count,))
        self._count = count
        self._num_before = 0  # before the restore
        self._num_to_pass = 0  # items of the source that were given before the restore
        for stage in self._walk()[1:]:
            stage._may_be_cut = True

    async def _pull(self, limit: int) -> Sequence[Any]:
        source = self._sources[0]
        if source._num_out < self._num_to_pass:
            await _pass_over(source, self._num_to_pass)
        left = self._count - self._num_before - self._num_out
        return await source._read(min(limit, left)) if left > 0 else ()

    def _num_in_at(self, num_out: int) -> int:
        """One less where it ends a pass: that item is read again after a restore.

        So the sources are where they were when the next pass begins, which is theirs to notice.
        """
        num_in = self._num_to_pass + num_out
        is_end = self._num_before + num_out >= self._count
        return num_in - 1 if is_end and self._epoch and num_in else num_in

    def _epoch_of(self, place: int) -> int:
        return self._sources[0]._epoch_of(self._num_to_pass + place)

    def _state_at(self, num_out: int) -> dict[str, Any]:
        num_to_pass = self._num_to_pass + num_out - self._num_in_at(num_out)
        return {
            "taken": self._num_before + num_out,
            **({"to_pass": num_to_pass} if num_to_pass else {}),
            **super()._state_at(num_out),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._num_before = saved_count(state["taken"])
        self._num_to_pass = saved_count(state.get("to_pass", 0))


class Shard(Stage[Any]):
    kind = "shard"

    def __init__(self, source: Stage[Any], num_shards: int, index: int) -> None:
        super().__init__(source, args=(num_shards, index))
        self._num_shards = num_shards
        self._index = index
        self._num_first = index  # to pass over before the first item
        self._num_passed = 0  # over, since the last item

    async def _pull(self, limit: int) -> Sequence[Any]:
        read = self._sources[0]._read
        while True:
            to_pass = self._to_pass_at(self._num_out) - self._num_passed
            items = await read(to_pass + 1)
            if not items:
                return ()
            if len(items) > to_pass:
                self._num_passed = 0
                return (items[to_pass],)
            self._num_passed += len(items)

    def _to_pass_at(self, num_out: int) -> int:
        return self._num_shards - 1 if num_out else self._num_first

    def _num_in_at(self, num_out: int) -> int:
        return 0 if num_out == 0 else self._num_first + 1 + (num_out - 1) * self._num_shards

    def _state_at(self, num_out: int) -> dict[str, Any]:
        return {
            "shard": [self._index, self._num_shards],
            "to_pass": self._to_pass_at(num_out),
            **super()._state_at(num_out),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        found, own = list(state["shard"]), [self._index, self._num_shards]
        if found != own:
            raise InputStateError(
                f"the state is that of shard {found[0]} of {found[1]}, and this is {own[0]} of "
                f"{own[1]}; other shards would lose items or repeat them"
            )
        super()._load(state)
        self._num_first = saved_count(state["to_pass"])


class Interleave(Stage[Any]):
    kind = "interleave"

    def __init__(self, *sources: Stage[Any]) -> None:
        super().__init__(*sources)
        self._next = 0  # the source to read next
        self._has_ended = [False] * len(sources)
        self._ends: dict[int, int] = {}  # behind how many items a source was seen to have ended
        self._nums_in = [0] * len(sources)
        self._nums_to_pass = [0] * len(sources)  # items that were given before the restore
        self._is_behind = False  # whether these, or an end, are still to be read
        self._log: deque[int] = deque()  # the source of each item, since those trimmed
        self._first = 0  # the source to read for the first of these

    async def _pull(self, limit: int) -> Sequence[Any]:
        if self._is_behind:
            for place, num in enumerate(self._nums_to_pass):
                await _pass_over(self._sources[place], num + (place in self._ends))
            self._is_behind = False
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
                self._ends.setdefault(place, self._num_out)
            self._next = (place + 1) % len(self._sources)
        return ()

    def _nums_at(self, num_out: int) -> tuple[int, list[int]]:
        """The source to read next, and the items each had given, behind that many items."""
        nums, log = list(self._nums_in), list(self._log)
        since = len(log) - (self._num_out - num_out)
        for place in log[since:]:
            nums[place] -= 1
        return (log[since - 1] + 1) % len(nums) if since else self._first, nums

    def _state_at(self, num_out: int) -> dict[str, Any]:
        turn, nums_in, to_pass = self._sources_at(num_out)
        sources = [each._saved_at(num) for each, num in zip(self._sources, nums_in, strict=True)]
        state = {"next": turn, "sources": sources}
        if not any(to_pass):
            return state
        return {**state, "to_pass": to_pass, "ended": self._ended_at(num_out)}

    def _epoch_of(self, place: int) -> int:
        raise self._no_epoch()

    def _ended_at(self, num_out: int) -> list[int]:
        return sorted(place for place, at in self._ends.items() if at < num_out)

    def _sources_at(self, num_out: int) -> tuple[int, list[int], list[int]]:
        """The source that was next; where to begin after a restore, and what to pass over then.

        Where a pass may be cut before the turn of a source, each one reads its last item again:
        see `Take._num_in_at`.
        """
        turn, nums = self._nums_at(num_out)
        nums = [num + more for num, more in zip(nums, self._nums_to_pass, strict=True)]
        is_cut = bool(self._may_be_cut and self._epoch)
        to_pass = [int(is_cut and num > 0) for num in nums]
        return turn, [num - less for num, less in zip(nums, to_pass, strict=True)], to_pass

    def _load(self, state: Mapping[str, Any]) -> None:
        for each, saved in zip(self._sources, state["sources"], strict=True):
            each._load_saved(saved)
        self._next = self._first = saved_count(state["next"]) % len(self._sources)
        nums = [saved_count(num) for num in state.get("to_pass", self._nums_to_pass)]
        self._nums_to_pass, self._is_behind = nums, any(nums)
        self._ends = {saved_count(place): -1 for place in state.get("ended", ())}

    def _trim(self, num_out: int) -> None:
        if self._num_out - num_out > len(self._log):  # another reader is farther
            return
        _, nums_in, _ = self._sources_at(num_out)
        while len(self._log) > self._num_out - num_out:
            self._first = (self._log.popleft() + 1) % len(self._sources)
        for each, num in zip(self._sources, nums_in, strict=True):
            each._trim(num)


async def _pass_over(source: Stage[Any], num: int) -> None:
    """Read the first items after a restore, which were given before it."""
    while source._num_out < num and await source._read(num - source._num_out):
        pass
