"""Settings and targets of `asynchooks plan`, as text."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..planning import Prediction

FIGURES = ("staleness", "max_staleness", "idle_share")
_WORDS = {"true": True, "false": False, "none": None}
_MOST_VALUES = 10_000
_TARGET = re.compile(r"\s*(\w+)\s*<=\s*(\S+)\s*")


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
    name, sign, values = text.partition("=")
    name = name.strip()
    if not sign or not name.isidentifier() or not values.strip():
        raise ValueError(f"{text!r}; give NAME=VALUES, such as concurrency=8..64 or batch=4,8")
    found: list[Any] = []
    for each in values.split(","):
        for value in _range(each.strip()) if ".." in each else [_value(each.strip())]:
            if not any(type(value) is type(other) and value == other for other in found):
                found.append(value)
    return name, found


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    return _WORDS.get(text.lower(), text)


def _range(text: str) -> list[int | float]:
    parts = [_value(part) for part in text.split("..")]
    is_number = all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts)
    if len(parts) not in (2, 3) or not is_number or parts[0] > parts[1]:
        raise ValueError(
            f"the range {text!r}; give two numbers, the smaller one first, and perhaps a step: "
            "8..64 doubles from 8 to 64, 1..9..2 goes by 2"
        )
    low, high = parts[:2]
    if len(parts) == 3:
        step = parts[2]
        if step <= 0 or (high - low) / step > _MOST_VALUES:
            raise ValueError(f"the step of the range {text!r}; give one > 0, such as 1..9..2")
        # a little more, so that 0.1..0.3..0.1 has its end
        return [low + step * each for each in range(math.floor((high - low) / step + 1e-9) + 1)]
    if low <= 0:
        raise ValueError(
            f"the range {text!r}, which cannot be doubled from {low}; give a step: {text}..1"
        )
    values = [low]
    while values[-1] * 2 < high:
        values.append(values[-1] * 2)
    return values if low == high else [*values, high]


def parse_target(text: str) -> Target:
    """The target of "staleness<=4"."""
    match = _TARGET.fullmatch(text)
    most = _value(match[2]) if match else None
    if match is None or match[1] not in FIGURES or isinstance(most, bool | str) or most is None:
        raise ValueError(
            f"{text!r}; give one of {', '.join(FIGURES)}, <= and a number, such as 'staleness<=4'"
        )
    return Target(match[1], float(most))


def products(settings: Sequence[tuple[str, list[Any]]]) -> list[dict[str, Any]]:
    """All combinations; the first name changes last. One empty dict if there are no names."""
    names = [name for name, _ in settings]
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(values for _, values in settings))
    ]
