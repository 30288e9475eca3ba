"""Progress as a line now and then, where there is no terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TextIO

from ._display import Surface
from ._rows import View, line_of, total_of

_MOST_LINES = 3
"""Of more trainings at once only the total is written."""


class PlainSurface(Surface):
    """Writes lines: at the start, every so many seconds, and at each end.

    Args:
        stream: where to; None for what `sys.stderr` is at that moment.
        hint: written once, before the first line; may be "".
    """

    interval_secs = 1.0

    def __init__(self, stream: TextIO | None = None, hint: str = "") -> None:
        self._stream = stream
        self._hint = hint
        self._every_secs = math.inf
        self._due_at = -math.inf

    def ask_every(self, secs: float) -> None:
        self._every_secs = min(self._every_secs, secs)
        self.interval_secs = min(1.0, self._every_secs)

    def draw(self, views: Sequence[View], last_lines: Sequence[str], now: float) -> None:
        lines = list(last_lines)
        views = [each for each in views if each.is_open]
        if views and now >= self._due_at:
            self._due_at = now + self._every_secs
            shown = views if len(views) <= _MOST_LINES else [total_of(views)]
            lines = [*lines, *(line_of(each, self.dot) for each in shown)]
        if lines:
            hint, self._hint = self._hint, ""
            self._write([hint, *lines] if hint else lines)

    def _write(self, lines: Sequence[str]) -> None:
        stream = self._stream or sys.stderr
        if stream is not None:  # a program without a console has none
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()

    @property
    def dot(self) -> str:
        return dot_for(self._stream or sys.stderr)

    def close(self) -> None:
        """Lines stay."""

    def forget(self) -> None:
        """It holds nothing."""


def dot_for(stream: object) -> str:
    """A dot, where the stream can take it."""
    try:
        " · ".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeError, LookupError):
        return ", "
    return " · "
