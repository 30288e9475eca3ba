"""Checks of arguments that several files share."""

from __future__ import annotations

import operator


def as_count(name: str, value: object, what: str, *, least: int) -> int:
    """The value as an integer number of `what`.

    Raises:
        TypeError: it is none (names the argument).
        ValueError: it is below `least`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give an integer number of {what}") from None
    if count < least:
        raise ValueError(f"{name} is {value!r}; give a number of {what} >= {least}")
    return count
