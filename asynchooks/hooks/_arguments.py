"""Checks of arguments that several hooks share."""

from __future__ import annotations

import math
import operator
from numbers import Real


def as_step(name: str, value: object) -> int:
    """The value as an integer number of steps.

    Raises:
        TypeError: it is none (names the argument).
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give an integer number of steps") from None


def as_secs(name: str, value: object) -> float:
    """The value as a time in seconds, > 0.

    Raises:
        TypeError: it is no number (names the argument).
        ValueError: it is not above 0, or not finite.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; give a number of seconds > 0")
    secs = float(value)
    if not 0 < secs < math.inf:
        raise ValueError(f"{name} is {value!r}; give finite seconds > 0")
    return secs
