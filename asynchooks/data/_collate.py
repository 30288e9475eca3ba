"""How items become a batch: arrays are stacked, tuples and mappings are kept around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import InputStructureError

_SIMPLE = frozenset((int, float, str, bytes, bool, type(None)))
_TEXTS = "USO"
"""NumPy's kinds of arrays that are no numbers."""


def collate_items(items: Sequence[Any], num_before: int) -> Any:
    """One batch of items of one structure.

    Args:
        items: at least one.
        num_before: items that came before these, for messages.

    Raises:
        InputStructureError: they do not fit together.
    """
    if _SIMPLE.issuperset(map(type, items)):
        return list(items)
    return _collate(items, num_before, "")


def _collate(items: Sequence[Any], num_before: int, path: str) -> Any:
    first = items[0]
    if isinstance(first, Mapping):
        keys = first.keys()
        _check(
            items, num_before, path, lambda item: isinstance(item, Mapping) and item.keys() == keys
        )
        return {
            key: _collate([item[key] for item in items], num_before, f"{path}[{key!r}]")
            for key in first
        }
    if isinstance(first, tuple):
        length = len(first)
        _check(
            items, num_before, path, lambda item: isinstance(item, tuple) and len(item) == length
        )
        parts = [
            _collate(part, num_before, f"{path}[{place}]")
            for place, part in enumerate(zip(*items, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if not hasattr(first, "__array__") or not hasattr(first, "shape"):
        _check(items, num_before, path, _is_leaf)
        return list(items)
    import numpy as np

    _check(items, num_before, path, lambda item: hasattr(item, "__array__"))
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


def _check(items: Sequence[Any], num_before: int, path: str, fits: Any) -> None:
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
