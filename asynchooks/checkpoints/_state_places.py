"""Comparing a saved state with a program's nested mapping, and putting its values back in place.

Nothing is put back before everything was compared. It reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from numbers import Number
from typing import Any

import numpy as np

from ._state_file import describe, is_array, is_tensor

Put = tuple[Any, Any, Any]
"""(a container, a key in it, the value to put there); an array is its own container, key None."""


def compare(place: str, live: Any, saved: Any, puts: list[Put], faults: list[str]) -> None:
    """Walk both side by side; collect the values to put back, and a line for each misfit."""
    if is_array(live):
        _compare_array(place, live, saved, puts, faults)
        return
    wanted, found = dict(_items(live)), dict(_items(saved))
    is_same_kind = isinstance(live, Mapping) == isinstance(saved, Mapping)
    if not is_same_kind or not _is_container(saved):
        faults.append(f"{place}: the checkpoint holds {describe(saved)}, here is {describe(live)}")
        return
    compare_names(place, live, wanted, saved, found, faults)
    for key in [each for each in wanted if each in found]:
        value, inner = wanted[key], path_of(place, live, key)
        if is_array(value) or _is_container(value):
            compare(inner, value, found[key], puts, faults)
        elif not _is_alike(value, found[key]):
            faults.append(
                f"{inner}: the checkpoint holds {describe(found[key])}, here is {describe(value)}"
            )
        elif isinstance(live, (MutableMapping, list)):
            puts.append((live, key, found[key]))
        else:
            kind = type(live).__name__
            faults.append(f"{inner}: nothing can be put into a {kind}; use a dict or a list")


def compare_names(
    place: str, live: Any, wanted: Mapping[Any, Any], saved: Any, found: Mapping[Any, Any],
    faults: list[str],
) -> None:  # fmt: skip
    """Note the keys that only one of both has."""
    for key in wanted:
        if key not in found:
            faults.append(f"{path_of(place, live, key)}: missing in the checkpoint")
    for key in found:
        if key not in wanted:
            faults.append(f"{path_of(place, saved, key)}: only in the checkpoint")


def compare_arrays(place: str, live: Mapping[Any, Any], saved: Any, faults: list[str]) -> None:
    """Note what keeps a flat dict of tensors, a module's, from taking the saved one."""
    if not isinstance(saved, Mapping):
        faults.append(f"{place}: the checkpoint holds {describe(saved)}, here is a module")
        return
    compare_names(place, live, live, saved, saved, faults)
    for key in live:
        if key in saved and is_array(live[key]):
            _compare_array(path_of(place, live, key), live[key], saved[key], [], faults)


def put_back(puts: list[Put]) -> None:
    """Put all the values in their places; arrays keep their memory."""
    for container, key, value in puts:
        if key is not None:
            container[key] = value
        elif is_tensor(container):
            container.detach().copy_(value)
        else:
            container[...] = value


def path_of(place: str, container: Any, key: Any) -> str:
    is_name = isinstance(container, Mapping) and isinstance(key, str)
    if is_name:
        return f"{place}.{key}" if place else key
    return f"{place}[{key!r}]"


def _compare_array(place: str, live: Any, saved: Any, puts: list[Put], faults: list[str]) -> None:
    fits = is_array(saved) and saved.dtype == live.dtype and saved.shape == live.shape
    if not fits:
        faults.append(f"{place}: the checkpoint holds {describe(saved)}, here is {describe(live)}")
    elif not is_tensor(live) and not live.flags.writeable:
        faults.append(f"{place}: the array here is read-only; make it writeable")
    else:
        puts.append((live, None, saved))


def _is_alike(live: Any, saved: Any) -> bool:
    """Whether a value that is no array can take the place of another; None stands for any."""
    if is_array(saved) or _is_container(saved):
        return False
    numbers = (Number, np.bool_)
    are_numbers = isinstance(live, numbers) and isinstance(saved, numbers)
    return live is None or saved is None or are_numbers or isinstance(saved, type(live))


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
