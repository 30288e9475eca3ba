"""batch and unbatch: arrays are stacked and taken apart, within tuples and mappings, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from .. import _check as check
from .._errors import InputStateError, InputStructureError, note_once, shown
from ._sources import Source, stage_of
from ._stage import Gathered, Mark, Pair, Stage, State, T, saved_count, state_of
from ._statistics import CALLS, CONSUMER

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Batched = TypeVar("Batched")
Key = TypeVar("Key")

_SIMPLE = frozenset((int, float, str, bytes, bool, type(None)))
_TEXTS = "USO"
"""NumPy's kinds of arrays that are no numbers."""


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

    Example:
        sizes = [len(images) async for images in batch(records, 40)]
        assert sizes == [40, 24]
    """
    batch_size = check.integer("batch_size", batch_size, least=1)
    check.instance("drop_remainder", drop_remainder, bool, "True or False")
    if collate is not None:
        if iscoroutinefunction(collate):
            raise TypeError(
                f"collate is {collate!r}, which is async; call it through map_concurrent"
            )
        check.function("collate", collate, "a function that takes a list of items", num_args=1)
    return Batch(stage_of(source), batch_size, drop_remainder, collate)


def unbatch(source: Source[Any]) -> Stage[Any]:
    """The items of each batch in turn: the inverse of what `batch` does by default.

    Lists and arrays are taken apart along their first axis, within tuples and mappings, too: a
    tuple of two arrays of 32 rows gives 32 tuples of two rows. A batch without items gives none.
    Its position may lie inside a batch, which is read again then.

    Args:
        source: of batches; see `asynchooks.data`.

    Raises:
        TypeError: `source` cannot be read.
        InputStructureError: out of the iteration: a batch is none, or its parts are of different
            lengths.

    Example:
        rows = unbatch([{"x": [1, 2], "y": ["a", "b"]}, {"x": [3], "y": ["c"]}])
        assert [row["y"] async for row in rows] == ["a", "b", "c"]
    """
    return Unbatch(stage_of(source))


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
        self._parameters = {"batch_size": batch_size}
        self._source = source
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder
        self._collate = collate

    def _set(self, state: State | None) -> None:
        self._gathered = Gathered()  # for the next batch; here, so that a cancellation loses none
        self._num_in = 0 if state is None else saved_count(state["items"])
        self._is_at_end = False

    def _at_first(self) -> dict[str, Any]:
        return {"items": 0}

    async def _pull(self, limit: int) -> Sequence[Pair]:
        gathered, size = self._gathered, self._batch_size
        if not self._is_at_end:
            self._is_at_end = not await self._source._read_into(gathered, size)
        items = gathered.items
        if not items or (len(items) < size and self._drop_remainder):
            self._gathered = Gathered()
            return ()
        collate, begun = self._collate, self._wait_for(CALLS)
        made = collate_items(items, self._num_in) if collate is None else collate(items)
        self._clocks.add_call(self._wait_for(CONSUMER) - begun)
        self._num_in += len(items)
        self._gathered = Gathered()
        return ((made, (self, {"items": self._num_in}, gathered.mark)),)

    def _explain(self, error: Exception) -> None:
        if self._is_at_end or len(self._gathered.items) == self._batch_size:  # else the source's
            note_once(error, f"in batch, after {self._num_in} items")


def collate_items(items: Sequence[Any], num_before: int) -> Any:
    """One batch of items, at least one, of one structure; `num_before`: items before these."""
    if _SIMPLE.issuperset(map(type, items)):
        return list(items)
    return _collate(items, num_before, "")


def _collate(items: Sequence[Any], num_before: int, path: str) -> Any:
    first = items[0]
    if isinstance(first, Mapping):
        keys = first.keys()
        fits = lambda item: isinstance(item, Mapping) and item.keys() == keys  # noqa: E731
        _check_all(items, num_before, path, fits)
        return {
            key: _collate([item[key] for item in items], num_before, f"{path}[{key!r}]")
            for key in first
        }
    if isinstance(first, tuple):
        length = len(first)
        fits = lambda item: isinstance(item, tuple) and len(item) == length  # noqa: E731
        _check_all(items, num_before, path, fits)
        parts = [
            _collate(part, num_before, f"{path}[{place}]")
            for place, part in enumerate(zip(*items, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if not hasattr(first, "__array__") or not hasattr(first, "shape"):
        _check_all(items, num_before, path, _is_leaf)
        return list(items)
    import numpy as np

    _check_all(items, num_before, path, lambda item: hasattr(item, "__array__"))
    arrays = [np.asarray(item) for item in items]
    shape = arrays[0].shape
    for place, array in enumerate(arrays):
        if array.shape != shape:
            raise InputStructureError(
                f"batch: item {num_before + place}{path} has the shape {array.shape}, and item "
                f"{num_before}{path} the shape {shape}; pad them to one shape, or give collate=list"
            )
        if (array.dtype.kind in _TEXTS) != (arrays[0].dtype.kind in _TEXTS):
            raise InputStructureError(
                f"batch: item {num_before + place}{path} is of {array.dtype}, and item "
                f"{num_before}{path} of {arrays[0].dtype}; give items of one kind, or collate=list"
            )
    return np.stack(arrays)


def _check_all(items: Sequence[Any], num_before: int, path: str, fits: Any) -> None:
    for place, item in enumerate(items):
        if not fits(item):
            raise InputStructureError(
                f"batch: item {num_before + place}{path} is {_short(item)}, and item "
                f"{num_before}{path} is {_short(items[0])}; give items of one structure, or "
                "collate=list"
            )


def _is_leaf(item: Any) -> bool:
    is_array = hasattr(item, "__array__") and hasattr(item, "shape")
    return not (is_array or isinstance(item, (tuple, Mapping)))


def _short(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"a mapping with the keys {list(item)}"
    if isinstance(item, tuple):
        return f"a tuple of {len(item)}"
    text = repr(item)
    return text if len(text) <= 80 else text[:77] + "..."


class _Inside(NamedTuple):
    """What a mark has that lies inside a batch."""

    given: int  # items of it
    before: Mark  # behind the batch before it


class Unbatch(Stage[Any]):
    kind = "unbatch"

    def _set(self, state: State | None) -> None:
        self._num_to_pass = 0 if state is None else saved_count(state["given"])
        self._items: Sequence[Any] = ()  # of the present batch
        self._num_given = 0  # of these
        self._before: Mark = None
        self._mark = self._sources[0]._origin()  # behind the present batch

    def _at_first(self) -> dict[str, Any]:
        return {"given": 0}

    async def _pull(self, limit: int) -> Sequence[Pair]:
        while self._num_given == len(self._items):
            pairs = await self._sources[0]._read(1)
            if not pairs:
                return ()
            batch, mark = pairs[0]
            self._items, self._num_given = (), 0
            self._before, self._mark = self._mark, mark
            items = _split(batch, "")
            self._num_given, self._num_to_pass = self._num_to_pass, 0
            if self._num_given > len(items):
                raise InputStateError(
                    f"{self!r} is to go on behind item {self._num_given} of a batch, which has "
                    f"{len(items)}; give the source that it was saved of, in batches of that size"
                )
            self._items = items
        begin = self._num_given
        self._num_given = min(begin + limit, len(self._items))
        found = self._items[begin : self._num_given]
        return [(item, self._behind(given)) for given, item in enumerate(found, begin + 1)]

    def _is_divided(self) -> bool:
        return False  # a part of an item may be used

    def _behind(self, given: int) -> Mark:
        if given == len(self._items):
            return self, self._at_first(), self._mark
        return self, _Inside(given, self._before), self._mark

    def _state_of(self, data: Any, below: Mark) -> dict[str, Any]:
        if isinstance(data, _Inside):
            return {"given": data.given, "source": state_of(data.before)}
        return super()._state_of(data, below)


def _split(batch: Any, path: str) -> Sequence[Any]:
    """The items of a batch; `path` leads to it, as a part of one."""
    if isinstance(batch, Mapping) and batch:
        rows = _rows({key: _split(batch[key], f"{path}[{key!r}]") for key in batch})
        return [dict(zip(batch, row, strict=True)) for row in rows]
    if isinstance(batch, tuple) and batch:
        rows = _rows({place: _split(each, f"{path}[{place}]") for place, each in enumerate(batch)})
        return [type(batch)(*row) for row in rows] if hasattr(batch, "_fields") else rows
    is_text = isinstance(batch, (str, bytes, Mapping, tuple))
    if is_text or not hasattr(batch, "__getitem__") or getattr(batch, "shape", True) == ():
        raise InputStructureError(
            f"unbatch: a batch{path} is {shown(batch)}; give lists or arrays, or tuples or "
            "mappings of these"
        )
    items: Sequence[Any] = batch
    return items


def _rows(parts: Mapping[Any, Sequence[Any]]) -> list[tuple[Any, ...]]:
    lengths = {key: len(part) for key, part in parts.items()}
    if len(set(lengths.values())) > 1:
        raise InputStructureError(
            f"unbatch: the parts of a batch are of different lengths, {lengths}; give parts of one "
            "length"
        )
    return list(zip(*parts.values(), strict=True))
