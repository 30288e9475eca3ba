"""What the JSON in a trace may hold: it is checked once, so that no user of a trace has to.

A trace may come from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._errors import shown

_MOST_SECS = 1e11
"""More than a clock of ours comes to, and in microseconds still exact to the eighth."""
MOST_WHOLE = 1 << 53
"""Whole numbers up to this are exact as float64, too."""


class Kind(NamedTuple):
    """What a value is, for people, and whether it is."""

    text: str
    holds: Callable[[Any], bool]

    def or_nothing(self) -> Kind:
        """The same, or null, or not there."""
        return Kind(f"{self.text}, or null", lambda value: value is None or self.holds(value))


def is_number(value: Any, most: float = math.inf) -> bool:
    """Whether it is finite, and not beyond this."""
    return type(value) in (int, float) and -most <= value <= most and abs(value) < math.inf


def is_whole(value: Any, least: int = -MOST_WHOLE, most: int = MOST_WHOLE) -> bool:
    return type(value) is int and least <= value <= most


def is_text(value: Any) -> bool:
    """Whether it can be encoded, and so printed."""
    return type(value) is str and (value.isascii() or not any(map(_is_surrogate, value)))


def _is_surrogate(char: str) -> bool:
    return "\ud800" <= char <= "\udfff"


def is_object(value: Any) -> bool:
    return type(value) is dict


SECS = Kind("a finite number of seconds", lambda value: is_number(value, _MOST_SECS))
_OBJECT = Kind("an object", is_object)
_TEXTS = Kind("a list of texts", lambda value: type(value) is list and all(map(is_text, value)))
_ABOUT: Mapping[str, Kind] = {
    "began": SECS,
    "ended": SECS,
    "settings": _OBJECT,
    "inline": _TEXTS,
}
"""What is known of a run; of what is not named here nothing is read."""


def check_about(about: Any) -> dict[str, Any]:
    """What a recorder says of its run, in which all that is read later is of its kind.

    Raises:
        ValueError: something is not; it says what, and what it should be.
    """
    check("what it says of itself", about, _OBJECT)
    about.pop("cpu", None)  # a reader gathers that from all chunks
    for name, kind in _ABOUT.items():
        if name in about:
            check(name, about[name], kind)
    return about  # type: ignore[no-any-return]  # checked to be a dict


def check(place: str, value: Any, kind: Kind) -> None:
    if not kind.holds(value):
        raise ValueError(f"{place} is {shown(value)}; expected {kind.text}")
