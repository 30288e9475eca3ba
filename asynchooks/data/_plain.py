"""Stages without tasks that look at one source: batch, shard and take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .._errors import InputStateError, note_once
from ._arguments import check_count, saved_count
from ._collate import collate_items
from ._sources import Source, stage_of
from ._stage import Stage, T

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Batched = TypeVar("Batched")
Key = TypeVar("Key")


@overload
def batch(  # type: ignore[overload-overlap]  # what is stacked comes before what is listed
    source: Source[np.generic | NDArray[Any]],
    batch_size: int,
    drop_remainder: bool = False,
    collate: None = None,
) -> Stage[NDArray[Any]]: ...
@overload
def batch(
    source: Source[tuple[Any, ...]],
    batch_size: int,
    drop_remainder: bool = False,
    collate: None = None,
) -> Stage[Any]: ...
@overload
def batch(  # type: ignore[overload-overlap]
    source: Source[Mapping[Key, Any]],
    batch_size: int,
    drop_remainder: bool = False,
    collate: None = None,
) -> Stage[dict[Key, Any]]: ...
@overload
def batch(
    source: Source[T], batch_size: int, drop_remainder: bool = False, collate: None = None
) -> Stage[list[T]]: ...
@overload
def batch(
    source: Source[Any],
    batch_size: int,
    drop_remainder: bool = False,
    *,
    collate: Callable[[list[Any]], Batched],
) -> Stage[Batched]: ...
@overload
def batch(
    source: Source[Any],
    batch_size: int,
    drop_remainder: bool,
    collate: Callable[[list[Any]], Batched],
) -> Stage[Batched]: ...
def batch(
    source: Source[Any],
    batch_size: int,
    drop_remainder: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Stage[Any]:
    """Join items to batches.

    Args:
        source: see `asynchooks.data`.
        batch_size: items in a batch, >= 1.
        drop_remainder: whether a last batch with fewer items is left out.
        collate: makes the batch of a list of items; None stacks arrays (NumPy's, and its numbers)
            along a new first axis, within tuples and mappings, too, and leaves all else as lists.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        InputStructureError: out of the iteration: items do not fit together (names the item).
    """
    batch_size = check_count("batch_size", batch_size, 1)
    if not isinstance(drop_remainder, bool):
        raise TypeError(f"drop_remainder is {drop_remainder!r}; give True or False")
    if collate is not None and iscoroutinefunction(collate):
        raise TypeError(f"collate is {collate!r}, which is async; call it through map_concurrent")
    if collate is not None and not callable(collate):
        raise TypeError(f"collate is {collate!r}; give a function that takes a list of items")
    return Batch(stage_of(source), batch_size, drop_remainder, collate)


def shard(source: Source[T], num_shards: int, index: int) -> Stage[T]:
    """Every `num_shards`-th item, from the item `index` on: one worker's part.

    Args:
        source: see `asynchooks.data`.
        num_shards: >= 1.
        index: in [0, num_shards).
    """
    num_shards = check_count("num_shards", num_shards, 1)
    index = check_count("index", index, 0)
    if index >= num_shards:
        raise ValueError(f"index is {index!r} of {num_shards} shards; give 0 to {num_shards - 1}")
    return Shard(stage_of(source), num_shards, index)


def take(source: Source[T], count: int) -> Stage[T]:
    """The first `count` items; no more are read.

    Args:
        source: see `asynchooks.data`.
        count: >= 0.
    """
    count = check_count("count", count, 0)
    return Take(stage_of(source), count)


class Batch(Stage[Any]):
    kind = "batch"

    def __init__(
        self,
        source: Stage[Any],
        batch_size: int,
        drop_remainder: bool,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__(source)
        self._source = source
        self._args = (batch_size, drop_remainder, collate)
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder
        self._collate = collate
        self._items: list[Any] = []  # of the next batch; here, so that a cancellation loses none
        self._num_in = 0
        self._num_before = 0  # items, in a former life
        self._is_at_end = False

    async def _pull(self, limit: int) -> Sequence[Any]:
        items, size = self._items, self._batch_size
        if not self._is_at_end:
            self._is_at_end = not await self._source._read_into(items, size)
        if not items or (len(items) < size and self._drop_remainder):
            self._items = []
            return ()
        if self._collate is None:
            made = collate_items(items, self._num_before + self._num_in)
        else:
            made = self._collate(items)
        self._num_in += len(items)
        self._items = []
        return (made,)

    def _explain(self, error: Exception) -> None:
        if len(self._items) == self._batch_size or self._is_at_end:  # else it is the source's
            note_once(error, f"in batch, after {self._num_before + self._num_in} items")

    def _anew(self, sources: Sequence[Stage[Any]]) -> Stage[Any]:
        return Batch(sources[0], *self._args)

    def _num_in_at(self, num_out: int) -> int:
        last = num_out * self._batch_size
        return min(last, self._num_in) if num_out == self._num_out else last

    def _state_at(self, num_out: int) -> dict[str, Any]:
        num_in = self._num_in_at(num_out)
        return {"items": self._num_before + num_in, "source": self._source._described(num_in)}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._num_before = saved_count(state["items"])

    def _keep(self, num_out: int) -> None:
        self._source._keep(self._num_in_at(num_out))


class Take(Stage[Any]):
    kind = "take"

    def __init__(self, source: Stage[Any], count: int) -> None:
        super().__init__(source)
        self._count = count
        self._num_before = 0  # in a former life

    async def _pull(self, limit: int) -> Sequence[Any]:
        left = self._count - self._num_before - self._num_out
        return await self._sources[0]._read(min(limit, left)) if left > 0 else ()

    def _anew(self, sources: Sequence[Stage[Any]]) -> Stage[Any]:
        return Take(sources[0], self._count)

    def _state_at(self, num_out: int) -> dict[str, Any]:
        return {"taken": self._num_before + num_out, **super()._state_at(num_out)}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self._num_before = saved_count(state["taken"])


class Shard(Stage[Any]):
    kind = "shard"

    def __init__(self, source: Stage[Any], num_shards: int, index: int) -> None:
        super().__init__(source)
        self._num_shards = num_shards
        self._index = index
        self._num_first = index  # to pass over before the first item
        self._num_passed = 0  # over, since the last item

    async def _pull(self, limit: int) -> Sequence[Any]:
        read = self._sources[0]._read
        while True:
            to_pass = (
                self._num_shards - 1 if self._num_out else self._num_first
            ) - self._num_passed
            items = await read(to_pass + 1)
            if not items:
                return ()
            if len(items) > to_pass:
                self._num_passed = 0
                return (items[to_pass],)
            self._num_passed += len(items)

    def _num_in_at(self, num_out: int) -> int:
        return 0 if num_out == 0 else self._num_first + 1 + (num_out - 1) * self._num_shards

    def _anew(self, sources: Sequence[Stage[Any]]) -> Stage[Any]:
        return Shard(sources[0], self._num_shards, self._index)

    def _state_at(self, num_out: int) -> dict[str, Any]:
        return {
            "shard": [self._index, self._num_shards],
            "to_pass": self._num_shards - 1 if num_out else self._num_first,
            **super()._state_at(self._num_in_at(num_out)),
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

    def _keep(self, num_out: int) -> None:
        super()._keep(self._num_in_at(num_out))
