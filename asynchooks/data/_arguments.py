"""Checks of numbers that stages take."""

from __future__ import annotations

import operator
from typing import Any

from .._errors import InputStateError


def check_count(name: str, value: Any, at_least: int) -> int:
    """The number, if it is a whole one and not too small."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give a whole number >= {at_least}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; give a whole number >= {at_least}")
    if count < at_least:
        raise ValueError(f"{name} is {value!r}; give a whole number >= {at_least}")
    return count


def too_short(source: object, length: int, begin: int) -> InputStateError:
    """The error of a source that ended before the position at which it was to go on."""
    return InputStateError(
        f"{source!r} ended after {length} items, and the saved position is behind item {begin}; "
        "give the source that it was saved of"
    )


def saved_count(value: Any) -> int:
    """A number of items out of a saved state.

    Raises:
        TypeError, ValueError: it is none.
    """
    return check_count("a number of items", value, 0)
