"""batch: items joined to batches; arrays are stacked, within tuples and mappings, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .. import _check as check
from .._errors import InputStructureError, note_once
from ._sources import Source, stage_of
from ._stage import Pair, Stage, State, T, saved_count
from ._statistics import CALLS, SOURCE

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
        check.function("collate", collate, "a function that takes a list of items")
    return Batch(stage_of(source), batch_size, drop_remainder, collate)


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
        self._pairs: list[Pair] = []  # of the next batch; here, so that a cancellation loses none
        self._num_in = 0 if state is None else saved_count(state["items"])
        self._is_at_end = False

    def _at_first(self) -> dict[str, Any]:
        return {"items": 0}

    async def _pull(self, limit: int) -> Sequence[Pair]:
        pairs, size = self._pairs, self._batch_size
        if not self._is_at_end:
            self._is_at_end = not await self._source._read_into(pairs, size)
        if not pairs or (len(pairs) < size and self._drop_remainder):
            self._pairs = []
            return ()
        items = [item for item, _ in pairs]
        collate, begun = self._collate, self._wait_for(CALLS)
        made = collate_items(items, self._num_in) if collate is None else collate(items)
        self._clocks.add_call(self._wait_for(SOURCE) - begun)
        self._num_in += len(items)
        self._pairs = []
        return ((made, (self, {"items": self._num_in}, pairs[-1][1])),)

    def _explain(self, error: Exception) -> None:
        if len(self._pairs) == self._batch_size or self._is_at_end:  # else it is the source's
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
