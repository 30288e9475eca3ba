"""Settings and targets of `asynchooks plan`, as text."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..planning import Prediction

_WORDS = {"true": True, "false": False, "none": None}
_MOST_VALUES = 10_000
_TARGET = re.compile(r"\s*(staleness|max_staleness|idle_share)\s*<=(.*)")


@dataclass(frozen=True)
class Target:
    """A bound of a figure."""

    figure: str
    most: float

    def is_kept(self, prediction: Prediction) -> bool:
        """Whether its whole interval is within the bound."""
        return bool(getattr(prediction, self.figure).high <= self.most)

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
    low, high, *steps = [_number(part) for part in text.split("..")]
    if low is None or high is None or low > high or len(steps) > 1 or None in steps:
        raise ValueError(
            f"the range {text!r}; give two numbers, the smaller one first, and perhaps a step: "
            "8..64 doubles from 8 to 64, 1..9..2 goes by 2"
        )
    values: list[int | float] = []
    if not steps:
        if low <= 0:
            raise ValueError(
                f"the range {text!r}, which cannot be doubled from {low}; give a step: {text}..1"
            )
        while low < high:
            values.append(low)
            low *= 2
        return [*values, high]
    step = steps[0]
    if step is None or step <= 0 or (high - low) / step > _MOST_VALUES:
        raise ValueError(f"the step of the range {text!r}; give one > 0, such as 1..9..2")
    # a little more, so that 0.1..0.3..0.1 has its end
    return [low + step * each for each in range(math.floor((high - low) / step + 1e-9) + 1)]


def parse_target(text: str) -> Target:
    """The target of "staleness<=4"."""
    match = _TARGET.fullmatch(text)
    most = _number(match[2]) if match else None
    if match is None or most is None:
        raise ValueError(
            f"{text!r}; give one of staleness, max_staleness, idle_share, <= and a number, such as "
            "'staleness<=4'"
        )
    return Target(match[1], float(most))
