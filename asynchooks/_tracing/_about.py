"""What the JSON in a trace may hold: it is checked once, so that no user of a trace has to.

A trace may come from anywhere. Here is what values are; how large a count may be beside what was
recorded, `planning/_models.py` says, which acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._errors import TraceError, shown

_MOST_SECS = 1e11
"""More than nanoseconds in 63 bits hold."""
_MOST_WHOLE = 1 << 53
"""Whole numbers up to this are exact as float64, too."""
_MOST_LABELS = 1 << 31


class _Kind(NamedTuple):
    """What a value is, for people, and whether it is."""

    text: str
    holds: Callable[[Any], bool]

    def or_nothing(self) -> _Kind:
        """The same, or null, or not there."""
        return _Kind(f"{self.text}, or null", lambda value: value is None or self.holds(value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_MOST_SECS <= value <= _MOST_SECS


def _is_whole(value: Any, least: int = -_MOST_WHOLE) -> bool:
    return type(value) is int and least <= value <= _MOST_WHOLE


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)


_SECS = _Kind("a finite number of seconds", _is_number)
_WHOLE = _Kind("a whole number", _is_whole)
_COUNT = _Kind("a whole number >= 0", lambda value: _is_whole(value, 0))
_SIZE = _Kind("a whole number >= 1", lambda value: _is_whole(value, 1))
_BOOL = _Kind("true or false", lambda value: type(value) is bool)
_TEXT = _Kind("a text", _is_text)
_OBJECT = _Kind("an object", lambda value: type(value) is dict)
_TEXTS = _Kind("a list of texts", lambda value: type(value) is list and all(map(_is_text, value)))
_COUNTS = _Kind(
    "an object of whole numbers >= 0",
    lambda value: type(value) is dict and all(_is_whole(each, 0) for each in value.values()),
)
_Fields = Mapping[str, "_Kind | _Fields"]
_PACKET: _Fields = {
    "version": _WHOLE.or_nothing(),
    "file": _COUNT,
    "process": _WHOLE.or_nothing(),
    "name": _TEXT.or_nothing(),
    "flushed": _SECS.or_nothing(),
    "cpu": _SECS.or_nothing(),
    "labels": _OBJECT.or_nothing(),
    "about": _OBJECT.or_nothing(),
}
_LABEL = (_TEXT, _TEXT.or_nothing(), _WHOLE, _BOOL, _BOOL)
_ABOUT: _Fields = {
    "began": _SECS,
    "ended": _SECS,
    "settings": _OBJECT,
    "machine": {"boot": _TEXT.or_nothing(), "host_time": _SECS.or_nothing()},
    "inline": _TEXTS,
    "server": {"processor_secs": _SECS, "served_processor_secs": _SECS, "requests": _COUNTS},
    "parameter server": {"num_workers": _SIZE, "protocol": _TEXT},
    "stage rollouts": {
        "fn": _TEXT,
        "batch_size": _SIZE,
        "concurrency": _SIZE,
        "max_staleness": _COUNT,
    },
    "stage map_concurrent": {"fn": _TEXT, "concurrency": _SIZE, "ordered": _BOOL},
    "stage batch": {"batch_size": _SIZE},
    "stage prefetch": {"buffer_size": _COUNT},
}
"""What is known of a run; of what is not named here nothing is read."""


def check_about(packet: Any, source: str) -> dict[str, Any]:
    """The object of one packet, in which all that is read later is of its kind.

    Raises:
        TraceError: something is not; it says what, and what it should be.
    """
    _check("what it says of itself", packet, _OBJECT, source)
    _check_fields("", packet, _PACKET, source)
    for number, label in (packet.get("labels") or {}).items():
        place = f"the label {shown(number)}"
        is_number = number.isdecimal() and number.isascii() and len(number) <= 10
        if not is_number or int(number) >= _MOST_LABELS:
            raise _refused(source, place, number, "a number below 2 ** 31")
        if type(label) is not list or len(label) != len(_LABEL):
            raise _refused(source, place, label, "a list of name, kind, worker and two booleans")
        for value, kind in zip(label, _LABEL, strict=True):
            _check(place, value, kind, source)
    about = packet.get("about") or {}
    about.pop("cpu", None)  # a reader gathers that from all packets
    for name, fields in _ABOUT.items():
        if name in about:
            if isinstance(fields, _Kind):
                _check(name, about[name], fields, source)
            else:
                _check(name, about[name], _OBJECT, source)
                _check_fields(f"{name}: ", about[name], fields, source)
    return packet  # type: ignore[no-any-return]  # checked to be a dict


def _check_fields(place: str, values: Mapping[str, Any], fields: _Fields, source: str) -> None:
    for name, kind in fields.items():
        assert isinstance(kind, _Kind)
        _check(f"{place}{name}", values.get(name), kind, source)


def _check(place: str, value: Any, kind: _Kind, source: str) -> None:
    if not kind.holds(value):
        raise _refused(source, place, value, kind.text)


def _refused(source: str, place: str, value: Any, expected: str) -> TraceError:
    return TraceError(
        f"{source} is damaged, or no trace of asynchooks: {place} is {shown(value)}; expected "
        f"{expected}. Record the run again"
    )
