"""Checks of arguments that several hooks share."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from numbers import Real
from typing import Any

from .._timer import SecondOrStepTimer, is_number


def as_step(name: str, value: object) -> int:
    """The value as an integer number of steps.

    Raises:
        TypeError: it is none (names the argument).
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give an integer number of steps") from None


def as_path(name: str, value: object) -> str:
    """The value as a path.

    Raises:
        TypeError: it is none (names the argument).
    """
    if not isinstance(value, (str, os.PathLike)) or isinstance(path := os.fspath(value), bytes):
        raise TypeError(f"{name} is {value!r}; give the path of a directory")
    return path


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


def saved_whole(state: Mapping[str, Any], key: str) -> int:
    """The whole number >= 0 that a hook's saved state holds under a key.

    Raises:
        ValueError, KeyError: it holds something else there, or nothing.
    """
    value = state[key]
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or number < 0:
        raise ValueError(f"the saved {key} is {value!r}; expected a whole number >= 0")
    return number


def saved_number(state: Mapping[str, Any], key: str) -> float:
    """The number that a hook's saved state holds under a key.

    Raises:
        TypeError, KeyError: it holds something else there, or nothing.
    """
    value = state[key]
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"the saved {key} is {value!r}; expected a number")
    return float(value)


def as_timer(**intervals: float | None) -> SecondOrStepTimer:
    """The timer of a hook whose two arguments are these: its seconds first, then its steps.

    Raises:
        ValueError: both or neither are given, or the one is below 0, or steps are no whole number
            (names the arguments).
        TypeError: it is no number.
    """
    (secs_name, secs), (steps_name, steps) = intervals.items()
    if (secs is None) == (steps is None):
        raise ValueError(
            f"got {steps_name}={steps!r} and {secs_name}={secs!r}; give exactly one of them (and "
            "None for the other)"
        )
    name, interval = (steps_name, steps) if secs is None else (secs_name, secs)
    if not is_number(interval):
        raise TypeError(f"{name} is {interval!r}; give a number >= 0")
    if not interval >= 0:  # type: ignore[operator]  # a number, as was looked at
        raise ValueError(f"{name} is {interval!r}; give a number >= 0")
    if secs is None and interval != math.inf and interval % 1:  # type: ignore[operator]
        raise ValueError(f"{name} is {interval!r}; give a whole number >= 0")
    return SecondOrStepTimer(every_secs=secs, every_steps=steps)  # type: ignore[arg-type]
