"""Settings and targets of `asynchooks plan`, as text."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any, NamedTuple

_WORDS = {"true": True, "false": False, "none": None}
_TARGET = re.compile(r"\s*(staleness|max_staleness|idle_share)\s*<=(.*)")


class Target(NamedTuple):
    """A bound of a figure."""

    figure: str
    most: float

    def __str__(self) -> str:
        return f"{self.figure} <= {self.most:g}"


def parse_setting(text: str) -> tuple[str, list[Any]]:
    """(The argument's name, its values) of "concurrency=8..64"."""
    name, _, values = text.partition("=")
    name = name.strip()
    if not name.isidentifier() or not values.strip():
        raise ValueError(f"{text!r}; give NAME=VALUES, such as concurrency=8..64 or batch=4,8")
    found: list[Any] = []
    for each in values.split(","):
        found += _range(each) if ".." in each else [_value(each)]
    # each value once: 1, 1.0 and True are three
    return name, list({(type(each), each): each for each in found}.values())


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        with suppress(ValueError, OverflowError):  # of an integer that is no float
            number = kind(text)
            if math.isfinite(number):
                return number
    return None


def _value(text: str) -> Any:
    number, text = _number(text), text.strip()
    return number if number is not None else _WORDS.get(text.lower(), text)


def _range(text: str) -> list[int | float]:
    low, high = map(_number, text.split("..", 1))
    if low is None or high is None or not 0 < low <= high:
        raise ValueError(
            f"the range {text!r}; give two numbers > 0, the smaller one first, as 8..64, which "
            "doubles from 8 to 64, or all values with commas, as 0,3,6"
        )
    values: list[int | float] = []
    while low < high:
        values.append(low)
        low *= 2
    return [*values, high]


def parse_target(text: str) -> Target:
    """The target of "staleness<=4"."""
    match = _TARGET.fullmatch(text)
    most = _number(match[2]) if match else None
    if match is None or most is None:
        raise ValueError(
            f"{text!r}; give one of staleness, max_staleness, idle_share, <= and a number, such as "
            "'staleness<=4'"
        )
    return Target(match[1], most)
