"""Checks of the numbers that delays, streams and clusters take."""

from __future__ import annotations

import math
import operator
from numbers import Real

LONGEST_SECS = 1e300
"""Seconds. Longer draws, of heavy tails that overflow a float, count as this long.

Far enough below the largest float for a sum of 10^8 of them.
"""


def checked_number(name: str, value: object, allowed: str = "a finite number") -> float:
    """The value as a float; an error unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; give {allowed}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; give {allowed}")
    return number


def checked_secs(name: str, value: object) -> float:
    allowed = f"seconds, >= 0 and at most {LONGEST_SECS:g}"
    number = checked_number(name, value, allowed)
    if not 0 <= number <= LONGEST_SECS:
        raise ValueError(f"{name} is {number}; give {allowed}")
    return number


def checked_secs_above_zero(name: str, value: object, otherwise: str = "") -> float:
    """`otherwise` tells what to give instead of a zero."""
    allowed = f"seconds, > 0 and at most {LONGEST_SECS:g}"
    number = checked_number(name, value, allowed)
    if not 0 < number <= LONGEST_SECS:
        raise ValueError(f"{name} is {number}; give {allowed}{otherwise}")
    return number


def checked_shape(name: str, value: object) -> float:
    """A parameter of a distribution, without a unit."""
    allowed = "a finite number > 0"
    number = checked_number(name, value, allowed)
    if not number > 0:
        raise ValueError(f"{name} is {number}; give {allowed}")
    return number


def checked_count(name: str, value: object, least: int = 0) -> int:
    """The whole number, of any size; an error if it is below `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; give a whole number >= {least}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} is {number}; give a whole number >= {least}")
    return number
