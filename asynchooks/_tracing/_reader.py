"""What the files of `_recorder.py` hold, as columns: the inverse of `_lines.py`.

A trace may come from anywhere. Each line is read by itself, and what is kept of it takes no more
memory than the line. A last line without an end, as a kill leaves it, is not looked at.
"""

from __future__ import annotations

import io
import json
import math
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._engine.recording import Kind
from .._errors import TraceError, shown
from ._about import SECS, check, check_about, is_number, is_text, is_whole
from ._label import Label
from ._lines import BEGIN, CUT, END, MOMENT, SPAN, VERSION

Table = NDArray[np.float64]
"""A row for each span: (label, track, begun, ended, ident, value, whether it was cut)."""

LABEL, TRACK, BEGUN, ENDED, IDENT, VALUE, IS_CUT = range(7)
_MOST_TICKS = 1e17
"""Microseconds: 1e11 s."""
_MOST_TRACKS, _MOST_IDENTS, _MOST_WORKERS = (1 << 16) - 1, (1 << 44) - 1, 1 << 31
_OF_KIND = {each.value: each for each in Kind}
_ON_SESSION = {Kind.WORK, Kind.BLOCK, Kind.EVALUATION, Kind.SAVE}
"""What is done for a session where it is on the track of one; elsewhere it says so itself."""
KINDS = (Kind.WORK, *(each for each in Kind if each is not Kind.WORK))
"""In the order in which a name is looked for: what was done, before what it was done for."""
_MALFORMED = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""What a line raises that no recorder has written: there are too many ways to check each."""


def _no_rows() -> Table:
    return np.zeros((0, 7))


@dataclass
class Content:
    """What one recorder has written."""

    labels: dict[int, Label] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    spans: Table = field(default_factory=_no_rows)
    """In order of their beginnings; what had not ended is cut, at the end of the file."""
    marks: Table = field(default_factory=_no_rows)
    """Moments; those with an ident are uses of what was made."""
    cpu: list[tuple[float, float]] = field(default_factory=list)
    """(When, processor seconds of the thread that began to record), at each write."""
    secs_back: float = 0.0
    """By how much the clock went back between two writes; a clock of ours never does."""


def read_contents(data: bytes, source: str) -> list[Content]:
    """What each recorder wrote whose file is in the data: several files may be joined.

    Args:
        data: of the file.
        source: its name, for errors.

    Raises:
        TraceError: it is no trace of ours, or one of another version, or damaged.
    """
    advice = "give a file that record(...) or TraceHook has written"
    if not data:
        raise TraceError(f"{source} is empty; {advice}")
    if not data.startswith(b"[\n"):
        raise TraceError(f"{source} is no trace of asynchooks; {advice}")
    readers: list[_Reader] = []
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.endswith(b"\n"):
            break  # cut off by a kill
        # of files that are joined each has a beginning
        if line == b"[\n":
            continue
        try:
            event = json.loads(line.removesuffix(b",\n"))
            if event["name"] == "process_name":
                version = event["args"]["version"]
                if version != VERSION:
                    raise TraceError(
                        f"{source} is a trace of version {shown(version)}, and this release reads "
                        f"version {VERSION}; read it with the release that wrote it"
                    )
                readers.append(_Reader())
            else:
                readers[-1].add(event)
        except TraceError:
            raise
        except _MALFORMED as error:
            raise TraceError(
                f"{source} is damaged in line {number:,}, or no trace of asynchooks: {error!r}; "
                "record the run again"
            ) from error
    if not readers:
        raise TraceError(f"{source} is no trace of asynchooks; {advice}")
    return [each.finished() for each in readers]


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


class _Reader:
    """Gathers what one recorder has written."""

    def __init__(self) -> None:
        self._content = Content()
        self._labels: dict[Label, int] = {}
        self._spans, self._marks = array("d"), array("d")
        self._open: dict[int, list[tuple[float, ...]]] = defaultdict(list)  # rows, by track
        self._sessions: set[int] = set()  # tracks
        self._latest = self._flushed = -math.inf

    def add(self, event: dict[str, Any]) -> None:
        """One line.

        Raises:
            ValueError, and others: it is none that a recorder has written.
        """
        phase, args = event["ph"], event.get("args", {})
        if phase == "M":
            if event["name"] == "asynchooks":
                self._add_about(**args)
            return
        if phase not in (SPAN, BEGIN, END, MOMENT):
            return
        track = _whole(event["tid"], _MOST_TRACKS)
        ticks = _number(event["ts"])
        begun, ended = ticks / 1e6, (ticks + _number(event.get("dur", 0.0))) / 1e6
        self._latest = max(self._latest, ended)
        value, is_cut = args.get("value", math.nan), args.get("is_cut", False) is True
        if value == value and not is_number(value):
            raise ValueError(f"the value {shown(value)}")
        if phase == END:
            if self._open[track]:
                label, _, begun, _, ident, *_ = self._open[track].pop()
                self._spans.extend((label, track, begun, ended, ident, value, is_cut))
            return
        ident = _whole(args["ident"], _MOST_IDENTS) if "ident" in args else -1
        row = (self._label_of(event, args), track, begun, ended, ident, value, is_cut)
        if phase == BEGIN:
            self._open[track].append(row)
        elif phase == SPAN:
            self._spans.extend(row)
        else:
            self._marks.extend(row)

    def _label_of(self, event: dict[str, Any], args: dict[str, Any]) -> int:
        name, kind = event["name"], event.get("cat")
        worker = _whole(args["worker"], _MOST_WORKERS) if "worker" in args else -1
        if args.get("is_cut") is True:
            name = name.removesuffix(CUT)
        if kind is None:
            of_kind = None if event["ph"] == MOMENT else Kind.WORK
        else:
            of_kind = _OF_KIND[kind]
            if of_kind is Kind.SESSION:
                self._sessions.add(event["tid"])
        is_on_session = args.get("is_on_session") is True or (
            of_kind in _ON_SESSION and event["tid"] in self._sessions
        )
        label = Label(name, of_kind, worker, is_on_session)
        number = self._labels.get(label)
        if number is None:
            if not is_text(name):
                raise ValueError(f"the name {shown(name)}")
            number = self._labels[label] = len(self._labels)
        return number

    def _add_about(self, *, flushed: Any, cpu: Any, about: Any) -> None:
        content = self._content
        check("flushed", flushed, SECS)
        check("cpu", cpu, SECS.or_nothing())
        content.about |= check_about(about)
        content.secs_back = max(content.secs_back, self._flushed - flushed)
        self._flushed = flushed
        if cpu is not None:
            content.cpu.append((flushed, cpu))

    def finished(self) -> Content:
        content = self._content
        for label, track, begun, _, ident, value, _ in [
            row for rows in self._open.values() for row in rows
        ]:
            ended = max(self._latest, begun)
            self._spans.extend((label, track, begun, ended, ident, value, True))
        content.labels = {number: label for label, number in self._labels.items()}
        spans, content.marks = (
            np.array(rows).reshape(-1, 7) for rows in (self._spans, self._marks)
        )
        content.spans = spans[np.lexsort((-spans[:, ENDED], spans[:, BEGUN]))]
        return content


def _number(value: Any) -> float:
    if not is_number(value, _MOST_TICKS):
        raise ValueError(f"the time {shown(value)}")
    return float(value)


def _whole(value: Any, most: int) -> int:
    if not is_whole(value, 0, most):
        raise ValueError(f"the number {shown(value)}; expected one from 0 to {most}")
    return int(value)
