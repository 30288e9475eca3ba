"""Checks of arguments that several hooks share."""

from __future__ import annotations

import operator


def as_step(name: str, value: object) -> int:
    """The value as an integer number of steps.

    Raises:
        TypeError: it is none (names the argument).
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give an integer number of steps") from None
