"""The lines of a trace: Chrome's JSON trace events, which Perfetto opens.

A file is `[`, and then one line for each event. It needs no end, so it is whole after each line,
also after a kill, and files of several processes can be joined. Nothing here knows of sessions.

Source: Chrome's "Trace Event Format": the phases X, B, E, i, C, s, f and M.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from .._engine.recording import Kind
from ._label import Label

VERSION = 3
"""Of what our reader reads."""
TICKS_PER_SEC = 8_000_000
"""Times are eighths of a microsecond: whole nanoseconds, and exact as doubles of microseconds.

So what one reading of the clock ended and began has one time, here, in Perfetto and in our reader.
"""
SPAN, BEGIN, END, MOMENT = "X", "B", "E", "i"
CUT = " (cut)"
"""Behind the name of a span that an error or a cancellation has ended."""


Event = tuple[str, Label, int, float, float, int, float, bool]
"""A span, its begin or its end alone, or a moment.

(Phase, label, track, begun and ended in seconds, the ident of what a span has made or a moment uses
or -1, the value or NaN, whether it was cut.) A plain tuple, as making one takes a third of the time
of a named one.
"""


class Writer:
    """Makes the lines of one file.

    Args:
        process: a number that most likely no other process of the run has.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._head = f'","pid":{process},"tid":'

    def opening(self, name: str) -> str:
        """What a file begins with; the name of the process."""
        return f"[\n{self.about('process_name', 0, name=name, version=VERSION)}"

    def about(self, what: str, track: int, **args: Any) -> str:
        """Something that has no time, such as the name of a track."""
        return f'{{"ph":"M{self._head}{track},"name":"{what}","args":{_json(args)}}},\n'

    def counter(self, name: str, points: Iterable[tuple[float, float]]) -> Iterator[str]:
        """The values of a counter: (seconds, value)."""
        middle = f',"name":{_json(name)},"args":{{"value":'
        for time, value in points:
            if math.isfinite(value):
                shown = f"{_ticks(time) / 8}{middle}{_number(value)}"
                yield f'{{"ph":"C{self._head}0,"ts":{shown}}}}},\n'

    def events(self, events: Sequence[Event]) -> Iterator[str]:
        """The lines of events, in the order in which readers are to take them up.

        Readers go by the order in the file where times are equal, as they often are in virtual
        time: a span of before ends first, and then the outer one of two begins.
        """
        timed = [
            (_ticks(begun), phase != END, -_ticks(ended), place)
            for place, (phase, _, _, begun, ended, _, _, _) in enumerate(events)
        ]
        timed.sort()
        head = self._head
        for start, _, end, place in timed:
            phase, label, track, _, _, ident, value, is_cut = events[place]
            shown, args = _shown(label, is_cut)
            if math.isfinite(value):
                args += f',"value":{_number(value)}'
            if ident >= 0:
                args += f',"ident":{ident}'
            dur = f',"dur":{(-end - start) / 8}' if phase == SPAN else ""
            more = f',"args":{{{args[1:]}}}' if args else ""
            yield f'{{"ph":"{phase}{head}{track},"ts":{start / 8}{dur}{shown}{more}}},\n'
            if ident >= 0:  # an arrow, from what made something to its use
                arrow = 'f","bp":"e' if phase == MOMENT else "s"
                yield (
                    f'{{"ph":"{arrow}{head}{track},"ts":{start / 8},"name":"use","cat":"use",'
                    f'"id":"{self._process}.{ident}"}},\n'
                )


def _ticks(secs: float) -> int:
    return round(secs * TICKS_PER_SEC)


def _number(value: float) -> str:
    """As JSON, whatever kind of number it is."""
    number = float(value)
    return repr(int(number) if number.is_integer() else number)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@lru_cache(maxsize=1000)
def _shown(label: Label, is_cut: bool) -> tuple[str, str]:
    """The name and the category of a span, and its arguments, each behind a comma."""
    kind = ""
    if label.kind is not None and label.kind is not Kind.WORK:  # what has no category is work
        kind = f',"cat":"{label.kind.value}"'
    args = "" if label.worker < 0 else f',"worker":{label.worker}'
    args += ',"is_on_session":true' if label.is_on_session else ""
    args += ',"is_cut":true' if is_cut else ""
    return f',"name":{_json(f"{label.name}{CUT}" if is_cut else label.name)}{kind}', args
