"""Perfetto's protobuf as a stream of chunks: whole after each chunk, so also after a kill.

A chunk has packets of any size (tracks, names, counters), then segments: a header in a field that
Perfetto does not know, which its readers skip, and records of one size, which NumPy encodes. Their
varints are padded to a fixed width, as protobuf allows. Nothing here knows of sessions or clocks.

Source: perfetto/protos/perfetto/trace: trace_packet, track_event, track_descriptor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._tracks import Label

Columns = Mapping[str, "NDArray[Any] | int"]
"""An integer stands for a column of it."""

HEADER_FIELD = 5000
"""Of a `TracePacket`: (1: which layout, 2: how many records of it follow, 3 to 5: its widths)."""
ABOUT_FIELD = 5001
"""Of a `TracePacket`: JSON for our reader, about the file or about names in it."""
VERSION = 2
"""Of what stands in those two fields."""
TRACK_BITS, _FILE_BITS = 16, 19  # together 35, in five bytes
TRACK_WIDTH = 5
_VARINT, _FIXED64, _BYTES = 0, 1, 2
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_PAIR = (_BEGIN, _END)
_NEEDS_NAMES, _NEW_NAMES = 2, 3
_SHIFTS = np.arange(0, 63, 7, dtype=np.uint64)
VALUE_NAME = "value"


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(field: int, wire: int) -> bytes:
    return varint(field << 3 | wire)


def number(field: int, value: int) -> bytes:
    return tag(field, _VARINT) + varint(value)


def nested(field: int, content: bytes) -> bytes:
    return tag(field, _BYTES) + varint(len(content)) + content


def text(field: int, value: str) -> bytes:
    return nested(field, value.encode())


@dataclass(frozen=True)
class _Column:
    at: int
    width: int
    is_fixed: bool  # 8 bytes as they are, not a varint

    def moved(self, by: int) -> _Column:
        return replace(self, at=self.at + by)


class Shape(NamedTuple):
    """What records of one layout are made of."""

    events: tuple[int, ...]
    """Types of track events."""
    has_flow: bool = False
    """Whether its event begins, or an instant ends, a flow."""
    has_value: bool = False
    """Whether its first event has a number."""


SPAN, FLOW_SPAN, VALUE_SPAN, FLOW_VALUE_SPAN, BEGIN, END, USE, MARK, FLOW_BEGIN = range(1, 10)
VALUE_END, COUNTER = 10, 11
SHAPES = {
    SPAN: Shape(_PAIR),
    FLOW_SPAN: Shape(_PAIR, has_flow=True),
    VALUE_SPAN: Shape(_PAIR, has_value=True),
    FLOW_VALUE_SPAN: Shape(_PAIR, has_flow=True, has_value=True),
    BEGIN: Shape((_BEGIN,)),
    FLOW_BEGIN: Shape((_BEGIN,), has_flow=True),
    END: Shape((_END,)),
    VALUE_END: Shape((_END,), has_value=True),
    USE: Shape((_INSTANT,), has_flow=True, has_value=True),
    COUNTER: Shape((_COUNTER,)),
    MARK: Shape((_INSTANT,), has_value=True),
}
"""By the number of a layout."""


class Widths(NamedTuple):
    """Bytes of the varints of a segment, as wide as its largest needs them."""

    time: int = 9
    name: int = 2
    value: int = 0
    """0: a double in 8 bytes."""


class Layout:
    """Records of one size, each of one or two packets.

    Args:
        shape: what they are made of.
        widths: of their varints.
        sequence: the file's `trusted_packet_sequence_id`.
    """

    def __init__(self, shape: Shape, widths: Widths, sequence: int) -> None:
        self._columns: list[tuple[str, _Column]] = []
        self._widths = widths
        template = bytearray()
        for event in shape.events:
            # of a span at its begin, which refers to names anyway: 2 bytes less than at its end
            is_value_here = shape.has_value and event == shape.events[0]
            template += self._packet(len(template), sequence, event, shape.has_flow, is_value_here)
        self._template = np.frombuffer(bytes(template), np.uint8)

    @property
    def width(self) -> int:
        """Bytes of a record."""
        return len(self._template)

    def _packet(
        self, start: int, sequence: int, event: int, has_flow: bool, has_value: bool
    ) -> bytes:
        found: list[tuple[str, _Column]] = []
        widths = self._widths

        def padded(body: bytearray, name: str, field: int, width: int) -> None:
            body += tag(field, _VARINT)
            found.append((name, _Column(len(body), width, is_fixed=False)))
            body += b"\x80" * (width - 1) + b"\x00"

        event_body = bytearray(number(9, event))
        padded(event_body, "track", 11, TRACK_WIDTH)
        if event == _COUNTER:
            event_body += tag(44, _FIXED64)
            found.append(("value", _Column(len(event_body), 8, is_fixed=True)))
            event_body += bytes(8)
        elif event != _END:
            padded(event_body, "name", 10, widths.name)
            if has_flow:
                event_body += tag(48 if event == _INSTANT else 47, _FIXED64)
                found.append(("flow", _Column(len(event_body), 8, is_fixed=True)))
                event_body += bytes(8)
        if has_value:
            if widths.value:
                before = number(1, 1) + tag(4, _VARINT)
            else:
                before = number(1, 1) + tag(5, _FIXED64)
            size = widths.value or 8
            event_body += tag(4, _BYTES) + varint(len(before) + size) + before
            found.append(("value", _Column(len(event_body), size, is_fixed=not widths.value)))
            event_body += b"\x80" * (size - 1) + b"\x00"
        of_event, found = found, []
        body = bytearray()
        padded(body, "ends" if event == _END else "begins", 8, widths.time)
        body += number(10, sequence)
        if event in (_BEGIN, _INSTANT) or has_value:
            body += number(13, _NEEDS_NAMES)
        body += tag(11, _BYTES) + varint(len(event_body))
        found += [(name, column.moved(len(body))) for name, column in of_event]
        body += event_body
        packet = nested(1, bytes(body))
        start += len(packet) - len(body)
        self._columns += [(name, column.moved(start)) for name, column in found]
        return packet

    def decode(self, data: memoryview, num: int) -> dict[str, NDArray[Any]]:
        """The columns of so many records: the inverse of `encode`."""
        records = np.frombuffer(data, np.uint8, num * self.width).reshape(num, self.width)
        columns: dict[str, NDArray[Any]] = {}
        for name, column in self._columns:
            some = records[:, column.at : column.at + column.width]
            if column.is_fixed:
                kind = np.float64 if name == "value" else np.int64
                columns[name] = np.ascontiguousarray(some).view(kind).reshape(num)
                continue
            total = np.zeros(num, np.int64)
            for place in range(column.width):
                total |= (some[:, place].astype(np.int64) & 0x7F) << 7 * place
            columns[name] = total
        if "value" in columns:
            columns["value"] = columns["value"].astype(np.float64)
        return columns

    def encode(self, num: int, columns: Columns) -> bytes:
        """So many records of these columns; times in ns, and all that is no float int64."""
        records = np.empty((num, self.width), np.uint8)
        records[:] = self._template
        for name, column in self._columns:
            values, at = columns[name], column.at
            if isinstance(values, int):
                records[:, at : at + column.width] = _padded(values, column.width)
                continue
            if column.is_fixed:
                whole = np.ascontiguousarray(values).view(np.uint8).reshape(num, 8)
                records[:, at : at + 8] = whole
                continue
            # few operations: in a thread each one has to wait for the GIL again
            sevens = (values.view(np.uint64)[:, None] >> _SHIFTS[: column.width]).astype(np.uint8)
            sevens |= 0x80
            sevens[:, -1] &= 0x7F
            records[:, at : at + column.width] = sevens
        return records.tobytes()


def _padded(value: int, width: int) -> NDArray[np.uint8]:
    """The varint of a value, in so many bytes."""
    last = width - 1
    seven = [value >> 7 * place & 0x7F | (0x80 if place < last else 0) for place in range(width)]
    return np.array(seven, np.uint8)


class Encoder:
    """The bytes of one file. Files of several processes may be joined: `cat a b > c`.

    Args:
        process: its name, on its track.
    """

    def __init__(self, process: str) -> None:
        # of this file, and most likely of no other that it will be joined with
        identity = int.from_bytes(os.urandom(4)) >> 32 - _FILE_BITS | 1 << _FILE_BITS - 1
        self._sequence, self._first_track = identity, identity << TRACK_BITS
        self._first_flow = identity << 44
        self._layouts: dict[tuple[int, Widths], Layout] = {}
        descriptor = number(1, self._first_track) + nested(
            3, number(1, os.getpid()) + text(6, process)
        )
        values = nested(3, number(1, 1) + text(2, VALUE_NAME))
        self.opening = self.about({"version": VERSION, "process": os.getpid(), "name": process})
        self.opening += nested(1, nested(60, descriptor)) + nested(
            1, number(10, identity) + number(13, _NEW_NAMES) + number(87, 1) + nested(12, values)
        )
        """What the file begins with."""

    def tracks(self, names: Mapping[int, str]) -> bytes:
        """New tracks: their numbers, from 1, and names."""
        return b"".join(self._track(each, text(2, name)) for each, name in names.items())

    def counters(self, names: Mapping[int, str]) -> bytes:
        """New tracks of counters."""
        return b"".join(
            self._track(each, text(2, name) + nested(8, b"")) for each, name in names.items()
        )

    def _track(self, each: int, more: bytes) -> bytes:
        ours = number(1, self._first_track + each) + number(5, self._first_track)
        return nested(1, nested(60, ours + more))

    def names(self, labels: Mapping[int, Label]) -> bytes:
        """New names of spans: their numbers, from 1."""
        if not labels:
            return b""
        entries = b"".join(
            nested(2, number(1, each) + text(2, of.shown)) for each, of in labels.items()
        )
        own = number(10, self._sequence) + number(13, _NEEDS_NAMES)
        kinds = {
            str(each): [of.name, of.kind and of.kind.value, of.worker, of.is_on_session, of.is_cut]
            for each, of in labels.items()
        }
        return nested(1, own + nested(12, entries)) + self.about({"labels": kinds})

    def about(self, what: Mapping[str, Any]) -> bytes:
        """What only our reader asks for."""
        content = json.dumps({"file": self._sequence, **what}, separators=(",", ":"))
        return nested(1, nested(ABOUT_FIELD, content.encode()))

    def points(self, tracks: Any, times: NDArray[np.int64], values: NDArray[np.float64]) -> bytes:
        """Values of counters: the tracks, ns, values."""
        columns: Columns = {"track": tracks, "begins": times, "value": values}
        return self.segment(COUNTER, len(times), columns)

    def segment(self, shape: int, num: int, columns: Columns) -> bytes:
        """So many records of one shape, behind their header; `track` by its number."""
        if num == 0:
            return b""
        widths, columns = _narrowed(SHAPES[shape], columns)
        layout = self._layouts.get((shape, widths))
        if layout is None:
            layout = Layout(SHAPES[shape], widths, self._sequence)
            self._layouts[shape, widths] = layout
        of_widths = number(3, widths.time) + number(4, widths.name) + number(5, widths.value)
        header = nested(HEADER_FIELD, number(1, shape) + number(2, num) + of_widths)
        ours = {"track": columns["track"] + self._first_track}
        if "flow" in columns:
            ours["flow"] = columns["flow"] + self._first_flow
        return nested(1, header) + layout.encode(num, {**columns, **ours})


def _narrowed(shape: Shape, columns: Columns) -> tuple[Widths, Columns]:
    """The least widths that hold the columns; the values as integers if all are."""
    latest = max(int(np.max(columns[name])) for name in ("begins", "ends") if name in columns)
    # one width for small names: segments of some names and of others have one layout
    names = columns.get("name", 0)
    most = names if isinstance(names, int) else int(names.max())
    value = 0
    if shape.has_value:
        values: Any = columns["value"]
        # beyond four bytes a double is as good; a padded varint cannot hold what is below 0
        if np.all((values >= 0) & (values < 1 << 28)) and np.all(np.trunc(values) == values):
            whole = values.astype(np.int64)
            value = _width(int(whole.max()))
            columns = {**columns, "value": whole}
    return Widths(_width(latest), _width(most), value), columns


def _width(value: int) -> int:
    """Bytes of the varint of a number."""
    return max(1, -(-value.bit_length() // 7))
