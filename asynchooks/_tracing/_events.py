"""Events of a trace, as columns of numbers, and the order in which they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _format
from ._format import Columns, Encoder

Table = NDArray[np.float64]
"""A row for each event: (layout, name, track, begun, ended, ident, value), times in seconds."""

SPAN, BEGIN, END, USE, MARK = range(5)
LAYOUT, NAME, TRACK, BEGUN, ENDED, IDENT, VALUE = range(7)
NO_IDENT = -1.0


def table(rows: Sequence[tuple[float, ...]]) -> Table:
    return np.array(rows, np.float64).reshape(len(rows), 7)


class Spans(NamedTuple):
    """Plain spans of one name on one track, in ns: many, so they are encoded as they are."""

    name: int
    track: int
    begun: NDArray[np.int64]
    ended: NDArray[np.int64]

    @property
    def table(self) -> Table:
        rows = np.empty((len(self.begun), 7))
        rows[:] = (SPAN, self.name, self.track, 0.0, 0.0, NO_IDENT, np.nan)
        rows[:, BEGUN], rows[:, ENDED] = self.begun / 1e9, self.ended / 1e9
        return rows

    def encoded(self, encoder: Encoder) -> bytes:
        columns: Columns = {
            "name": self.name,
            "track": self.track,
            "begins": np.ascontiguousarray(self.begun),
            "ends": np.ascontiguousarray(self.ended),
        }
        return encoder.segment(_format.SPAN, len(self.begun), columns)


def in_order(events: Table) -> Table:
    """The events so that each span is behind the one that it is in, also where times are equal.

    Of equal ones the outer is to come first. Needed in virtual time alone: readers sort by time,
    and go by the order in the file where two events have one time.
    """
    is_end = events[:, LAYOUT] == END
    is_moment = events[:, BEGUN] == events[:, ENDED]  # rather before a span than within it
    time = np.where(is_end, events[:, ENDED], events[:, BEGUN])
    return events[np.lexsort((-events[:, ENDED], ~is_moment, ~is_end, time))]


def encoded(encoder: Encoder, events: Table, *, is_sorted: bool) -> bytes:
    """The events as segments of a chunk; `is_sorted`: they must stay in this order."""
    codes = _codes(events)
    if is_sorted:
        edges = np.flatnonzero(np.diff(codes)) + 1
        parts = np.split(np.arange(len(events)), edges) if len(events) else []
    else:
        parts = [np.flatnonzero(codes == code) for code in _SHAPES]
    return b"".join(
        encoder.segment(_SHAPES[int(codes[part[0]])], len(part), _columns(events[part]))
        for part in parts
        if len(part)
    )


def _codes(events: Table) -> NDArray[np.int64]:
    layout = events[:, LAYOUT].astype(np.int64)
    has_flow, has_value = events[:, IDENT] >= 0, np.isfinite(events[:, VALUE])
    return 4 * layout + 2 * has_flow + has_value


_SHAPES = {
    4 * layout + 2 * has_flow + has_value: shape
    for (layout, has_flow, has_value), shape in {
        (SPAN, False, False): _format.SPAN,
        (SPAN, True, False): _format.FLOW_SPAN,
        (SPAN, False, True): _format.VALUE_SPAN,
        (SPAN, True, True): _format.FLOW_VALUE_SPAN,
        (BEGIN, False, False): _format.BEGIN,
        (BEGIN, True, False): _format.FLOW_BEGIN,
        (END, False, False): _format.END,
        (END, False, True): _format.VALUE_END,
        (USE, True, True): _format.USE,
        (MARK, False, True): _format.MARK,
    }.items()
}
"""By `_codes`."""


def _columns(events: Table) -> Columns:
    return {
        "name": events[:, NAME].astype(np.int64),
        "track": events[:, TRACK].astype(np.int64),
        "begins": nanoseconds(events[:, BEGUN]),
        "ends": nanoseconds(events[:, ENDED]),
        "flow": events[:, IDENT].astype(np.int64),
        "value": events[:, VALUE],
    }


def nanoseconds(secs: Table) -> NDArray[np.int64]:
    """Whole nanoseconds."""
    return (secs * 1e9 + 0.5).astype(np.int64)
