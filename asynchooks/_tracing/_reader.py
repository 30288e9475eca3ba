"""What the files of `_recorder.py` hold, as columns: the inverse of `_format.py`.

Packets are read one after the other, segments of records at once. What is behind the last whole
packet, as a kill leaves it, is not looked at.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._engine.recording import Kind
from .._errors import TraceError
from . import _format
from ._about import check_about
from ._format import ABOUT_FIELD, HEADER_FIELD, TRACK_BITS, Layout, Widths
from ._tracks import Label

Table = NDArray[np.float64]
"""A row for each span: (label, track, begun, ended, ident, value, whether it was cut)."""

LABEL, TRACK, BEGUN, ENDED, IDENT, VALUE, IS_CUT = range(7)
_IDENT_BITS = 44
_ANY_SEQUENCE = 1 << 18  # as wide as each
_WIDTHS = range(1, 10)
"""Bytes of a varint of 63 bits."""
_SPANS = (_format.SPAN, _format.FLOW_SPAN, _format.VALUE_SPAN, _format.FLOW_VALUE_SPAN)
_BEGINS, _ENDS = (_format.BEGIN, _format.FLOW_BEGIN), (_format.END, _format.VALUE_END)
_OF_KIND = {each.value: each for each in Kind}
_FIRST = (Kind.WORK, Kind.REQUEST, Kind.SERVE)
KINDS = (*_FIRST, *(each for each in Kind if each not in _FIRST))
"""In the order in which a name is looked for: what was done, before what it was done for."""


@dataclass
class Content:
    """What one recorder has written."""

    labels: dict[int, Label] = field(default_factory=dict)
    tracks: dict[int, str] = field(default_factory=dict)
    """Their names, by their number in this file."""
    about: dict[str, Any] = field(default_factory=dict)
    spans: Table = field(default_factory=lambda: np.zeros((0, 7)))
    """In order of their beginnings; what had not ended is cut, at the end of the file."""
    uses: Table = field(default_factory=lambda: np.zeros((0, 7)))
    marks: Table = field(default_factory=lambda: np.zeros((0, 7)))
    cpu: list[tuple[float, float]] = field(default_factory=list)
    """(When, processor seconds of the thread that began to record), at each write."""
    secs_back: float = 0.0
    """By how much the clock went back between two writes; a clock of ours never does."""

    def shift(self, secs: float) -> None:
        """Move all times, to another machine's clock."""
        for each in (self.spans, self.uses, self.marks):
            each[:, BEGUN : ENDED + 1] += secs
        self.about |= {
            key: self.about[key] + secs for key in ("began", "ended") if key in self.about
        }


def read_contents(data: bytes, source: str) -> list[Content]:
    """What each recorder wrote whose file is in the data: several files may be joined.

    Args:
        data: of the file.
        source: its name, for errors.

    Raises:
        TraceError: it is no trace of ours, or one of a later version, or damaged.
    """
    try:
        return _contents(data, source)
    except TraceError:
        raise
    except _MALFORMED as error:
        raise TraceError(
            f"{source} is damaged, or no trace of asynchooks ({error!r}); record the run again"
        ) from error


_MALFORMED = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""What bytes raise that no recorder has written: there are too many ways to check each."""


def _contents(data: bytes, source: str) -> list[Content]:
    readers: dict[int, _Reader] = {}
    place = 0
    view = memoryview(data)
    if not data:
        raise TraceError(
            f"{source} is empty; give a file that record(...) or TraceHook has written"
        )
    for field_number, body, place in _packets(data, source):
        if field_number == ABOUT_FIELD:
            about = check_about(json.loads(bytes(body)), source)
            version = about.get("version")
            if version is not None and version != _format.VERSION:
                raise TraceError(
                    f"{source} is a trace of version {version}, and this release reads version "
                    f"{_format.VERSION}; read it with the release that wrote it"
                )
            readers.setdefault(about["file"], _Reader()).add_about(about)
        elif field_number == HEADER_FIELD:
            header = _header_of(body, source)
            width = header.layout.width
            num = min(header.num, (len(data) - place) // width)
            if num:
                columns = header.layout.decode(view[place : place + num * width], num)
                file = int(columns["track"][0]) >> TRACK_BITS
                readers.setdefault(file, _Reader()).add(header.shape, columns, num)
        elif field_number == 60:
            file, track, name = _track_of(body)
            if name is not None:
                readers.setdefault(file, _Reader()).content.tracks[track] = name
    if not readers:
        raise TraceError(
            f"{source} is no trace of asynchooks; give a file that record(...) or TraceHook has "
            "written"
        )
    return [each.finished() for each in readers.values()]


def durations(data: bytes, source: str, name: str) -> NDArray[np.float64]:
    """Seconds of the spans of a name that were not cut, of the first of `KINDS` that has some.

    Raises:
        TraceError: it is no trace, or has no such span.
    """
    found: dict[Kind, list[NDArray[np.float64]]] = {}
    names: set[str] = set()
    for content in read_contents(data, source):
        whole = content.spans[content.spans[:, IS_CUT] == 0.0]
        for number, label in content.labels.items():
            rows = whole[whole[:, LABEL] == number]
            if label.kind is None or not len(rows):
                continue
            names.add(label.name)
            if label.name == name:
                found.setdefault(label.kind, []).append(rows[:, ENDED] - rows[:, BEGUN])
    for kind in KINDS:
        if kind in found:
            return np.concatenate(found[kind])
    there = ", ".join(map(repr, sorted(names))) or "no span at all"
    raise TraceError(f"{source} has no span of {name!r} that was not cut; it has {there}")


def _packets(data: bytes, source: str) -> Iterator[tuple[int, memoryview, int]]:
    """(The field that says what it is, its content, the place behind it), of our packets.

    Records behind a header are skipped.
    """
    view, place, total = memoryview(data), 0, len(data)
    while place < total:
        if data[place] != 0x0A:
            raise TraceError(
                f"{source} is no trace, or damaged at byte {place:,}; give a file that "
                "record(...) or TraceHook has written"
            )
        size, begin = _varint(data, place + 1)
        if begin < 0 or begin + size > total:
            return  # cut off by a kill
        place = begin + size
        if size == 0:
            continue
        tag, at = _varint(data, begin)
        if tag & 7 == 2 and tag >> 3 in (ABOUT_FIELD, HEADER_FIELD, 60):
            length, at = _varint(data, at)
            if at < 0 or at + length > place:
                raise TraceError(f"{source} is damaged at byte {begin:,}; record it again")
            body = view[at : at + length]
            yield tag >> 3, body, place
            if tag >> 3 == HEADER_FIELD:
                header = _header_of(body, source)
                place += header.num * header.layout.width


class _Header(NamedTuple):
    """Of a segment of records."""

    shape: int
    num: int
    layout: Layout


def _header_of(body: memoryview, source: str) -> _Header:
    numbers = dict(_varints(body))
    shape, widths = numbers.get(1), Widths(*(numbers.get(each, -1) for each in (3, 4, 5)))
    is_narrow = all(each in _WIDTHS for each in (widths.time, widths.name, widths.value or 1))
    if shape not in _format.SHAPES or 2 not in numbers or not is_narrow:
        raise TraceError(
            f"{source} is damaged, or a trace of another version; record it again with this release"
        )
    return _Header(shape, numbers[2], Layout(_format.SHAPES[shape], widths, _ANY_SEQUENCE))


def _varint(data: bytes | memoryview, place: int) -> tuple[int, int]:
    """(Its value, the place behind it); (0, -1) if it is cut off, or the one before it was."""
    value = shift = 0
    while 0 <= place < len(data) and shift < 70:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
    return 0, -1


def _varints(body: memoryview) -> Iterator[tuple[int, int]]:
    place = 0
    while place < len(body):
        tag, place = _varint(body, place)
        value, place = _varint(body, place)
        if place < 0:
            return
        yield tag >> 3, value


def _track_of(body: memoryview) -> tuple[int, int, str | None]:
    """(The file, the track's number in it, its name) of a descriptor; None: of a process."""
    uuid, name, is_counter, place = 0, None, False, 0
    while place < len(body):
        tag, place = _varint(body, place)
        value, place = _varint(body, place)
        if place < 0:
            break
        if tag & 7 == 2:
            if tag >> 3 == 2:
                name = bytes(body[place : place + value]).decode()
            is_counter = is_counter or tag >> 3 == 8
            place += value
        elif tag >> 3 == 1:
            uuid = value
    return uuid >> TRACK_BITS, uuid & (1 << TRACK_BITS) - 1, None if is_counter else name


class _Reader:
    """Gathers what one recorder has written."""

    def __init__(self) -> None:
        self.content = Content()
        self._spans: list[Table] = []
        self._instants: dict[int, list[Table]] = defaultdict(list)
        self._open: list[tuple[float, int, Table]] = []
        self._latest = -np.inf
        self._flushed = -np.inf

    def add_about(self, about: Mapping[str, Any]) -> None:
        if (flushed := about.get("flushed")) is not None:
            self.content.secs_back = max(self.content.secs_back, self._flushed - flushed)
            self._flushed = flushed
            if about.get("cpu") is not None:
                self.content.cpu.append((flushed, about["cpu"]))
        labels = about.get("labels") or {}
        for number, (name, kind, worker, on_session, is_cut) in labels.items():
            label = Label(name, _OF_KIND.get(kind), worker, on_session, is_cut)
            self.content.labels[int(number)] = label
        self.content.about |= about.get("about") or {}
        self.content.about |= {
            key: value for key, value in about.items() if key in ("process", "name")
        }

    def add(self, shape: int, columns: Mapping[str, NDArray[Any]], num: int) -> None:
        rows = np.zeros((num, 7))
        rows[:, LABEL] = columns.get("name", 0)
        rows[:, TRACK] = columns["track"] & (1 << TRACK_BITS) - 1
        begun, ended = columns.get("begins"), columns.get("ends")
        rows[:, BEGUN] = (ended if begun is None else begun) / 1e9  # type: ignore[operator]
        rows[:, ENDED] = (begun if ended is None else ended) / 1e9  # type: ignore[operator]
        rows[:, IDENT] = -1.0
        if "flow" in columns:
            rows[:, IDENT] = columns["flow"] & (1 << _IDENT_BITS) - 1
        rows[:, VALUE] = columns.get("value", np.nan)
        if shape in _SPANS:
            self._spans.append(rows)
        elif shape in (_format.USE, _format.MARK):
            self._instants[shape].append(rows)
        elif shape in (*_BEGINS, *_ENDS):
            self._open += [(row[BEGUN], shape, row) for row in rows]
        self._latest = max(self._latest, float(rows[:, ENDED].max()))

    def finished(self) -> Content:
        content = self.content
        rows = np.concatenate([*self._spans, np.zeros((0, 7))])
        cut_at = self._cut_at(rows)
        labels = content.labels.items()
        rows[:, IS_CUT] = np.isin(rows[:, LABEL], [n for n, each in labels if each.is_cut])
        is_note = np.isin(rows[:, LABEL], [n for n, each in labels if not each.kind])
        rows = np.concatenate([rows[~is_note], self._joined(cut_at)])
        content.spans = rows[np.lexsort((-rows[:, ENDED], rows[:, BEGUN]))]
        content.uses, content.marks = (
            np.concatenate([*self._instants[shape], np.zeros((0, 7))])
            for shape in (_format.USE, _format.MARK)
        )
        return content

    def _cut_at(self, rows: Table) -> set[tuple[float, float]]:
        """(Track, time) of ends by a cut, of spans whose begin and end are apart."""
        notes = [n for n, label in self.content.labels.items() if label.kind is None]
        some = rows[np.isin(rows[:, LABEL], notes)]
        return {(row[TRACK], row[ENDED]) for row in some}

    def _joined(self, cut_at: set[tuple[float, float]]) -> Table:
        """Spans of begins and ends that were written apart; what had not ended is cut."""
        found: list[Table] = []
        stacks: dict[float, list[Table]] = defaultdict(list)
        # the sort is stable: what comes first in the file comes first of equal times
        for _, shape, row in sorted(self._open, key=lambda each: each[0]):
            stack = stacks[row[TRACK]]
            if shape in _BEGINS:
                stack.append(row)
            elif stack:
                begun = stack.pop()
                begun[ENDED], begun[VALUE] = row[ENDED], row[VALUE]
                begun[IS_CUT] = (row[TRACK], row[ENDED]) in cut_at
                found.append(begun)
        for row in [row for stack in stacks.values() for row in stack]:
            row[ENDED], row[IS_CUT] = max(self._latest, row[BEGUN]), True
            found.append(row)
        return np.array(found).reshape(len(found), 7)
