"""Checks of the numbers that delays and streams take. Nothing is drawn here."""

from __future__ import annotations

import math
import operator
from numbers import Real

LONGEST_SECS = 1e300
"""Seconds. A heavy tail overflows a float: what would be longer counts as this long.

Far enough below the largest float that 10^8 of them still have a sum.
"""


def checked_number(name: str, value: object, allowed: str = "a finite number") -> float:
    """The value as a float, unless it is none, NaN or infinite."""
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
    """`otherwise` says what to give instead of a zero."""
    allowed = f"seconds, > 0 and at most {LONGEST_SECS:g}"
    number = checked_number(name, value, allowed)
    if not 0 < number <= LONGEST_SECS:
        raise ValueError(f"{name} is {number}; give {allowed}{otherwise}")
    return number


def checked_shape(name: str, value: object) -> float:
    """A law's parameter without a unit."""
    allowed = "a finite number > 0"
    number = checked_number(name, value, allowed)
    if not number > 0:
        raise ValueError(f"{name} is {number}; give {allowed}")
    return number


def checked_count(name: str, value: object) -> int:
    """The whole number, of any size, unless it is negative."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; give a whole number >= 0")
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"{name} is {number}; give a whole number >= 0")
    return number


def checked_positive(name: str, value: object) -> int:
    """The whole number, unless it is below 1."""
    number = checked_count(name, value)
    if number < 1:
        raise ValueError(f"{name} is {number}; give a whole number >= 1")
    return number
