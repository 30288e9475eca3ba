"""Progress in place at the bottom of a terminal, with what else is printed above it.

The cursor stays visible, and at the start of the bar: a process that is killed leaves a terminal
that works, and what others write directly goes over the bar, which is drawn again below it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

from ..._engine.current import system_now
from ._display import Surface
from ._plain import dot_for
from ._rows import View, cells_of, counted, folded_text, line_of, rows_of

_ERASE = "\r\x1b[J"
_MOST_ROWS = 10
_TABLE_WIDTH = 60
"""Columns of a terminal, at least, for a table; a narrower one gets lines."""
_REDRAW_SECS = 0.05
"""A flood of lines has the bar drawn below each of them only if the last time was so long ago."""


class TerminalSurface(Surface):
    """Draws with rich.

    Args:
        console: rich's, which knows size, colours and encoding; only its text is used.
        write: takes the text for the terminal; None for a file of its own on the console's file
            descriptor, whose buffer is shared with no other code.
    """

    interval_secs = 0.25

    def __init__(self, console: Any, write: Callable[[str], object] | None = None) -> None:
        self._console = console
        self._own: TextIO | None = None
        if write is None:
            encoding = getattr(console.file, "encoding", None) or "utf-8"
            # open until the surface is closed
            self._own = os.fdopen(
                os.dup(console.file.fileno()), "w", encoding=encoding, errors="replace", newline=""
            )
            write = self._write_own
        self._write = write
        # a garbage collector's call may write while its own thread does
        self._lock = threading.RLock()  # guards the next four
        self._bar = ""
        self._is_drawn = self._is_mid_line = False
        self._drawn_at = 0.0
        self._streams: list[_Above] = []
        self._handlers: list[tuple[Any, _Above]] = []
        self._is_closed = False

    def _write_own(self, text: str) -> None:
        assert self._own is not None
        self._own.write(text)
        self._own.flush()

    @property
    def dot(self) -> str:
        return dot_for(self._console.file)

    def draw(self, views: Sequence[View], last_lines: Sequence[str], now: float) -> None:
        self._take_streams()
        bar = self._rendered(views) if views else ""
        lines = "".join(f"{line}\n" for line in last_lines)
        with self._lock:
            self._bar = bar
            if lines and self._is_mid_line:
                lines = f"\n{lines}"
                self._is_mid_line = False
            if not self._is_mid_line:  # else the next line's end has it drawn
                self._write((_ERASE if self._is_drawn else "") + lines + bar)
                self._is_drawn, self._drawn_at = bool(bar), system_now()

    def _rendered(self, views: Sequence[View]) -> str:
        """The bar: lines, and the way back to the start of the first one."""
        console, rows = self._console, _table(views, self._console, self.dot)
        with console.capture() as capture:
            console.print(rows, width=console.width - 1)
        text: str = capture.get().rstrip("\n")
        num_up = text.count("\n")
        return text + (f"\x1b[{num_up}A\r" if num_up else "\r")

    def _take_streams(self) -> None:
        """Have what is printed go above the bar, as long as it is drawn."""
        if self._streams:
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            while isinstance(stream, _Above):  # of a display that is just being closed
                stream = stream.original
            if stream is not None and _terminal_of(stream) == _terminal_of(self._console.file):
                above = _Above(stream, name, self)
                self._streams.append(above)
                setattr(sys, name, above)
        for logger in (logging.getLogger(), logging.getLogger("asynchooks")):
            for handler in logger.handlers:
                for above in self._streams:
                    if getattr(handler, "stream", None) is above.original:
                        with suppress(AttributeError):  # its own, or a property
                            handler.setStream(above)  # type: ignore[attr-defined]
                            self._handlers.append((handler, above))

    def _give_streams_back(self) -> None:
        streams, self._streams = self._streams, []
        handlers, self._handlers = self._handlers, []
        for above in streams:
            if getattr(sys, above.name) is above:
                setattr(sys, above.name, above.original)
        for handler, above in handlers:
            if handler.stream is above:
                handler.setStream(above.original)

    def write_above(self, original: Any, text: str) -> int:
        """Write to a stream on the same terminal, above the bar."""
        with self._lock:
            if self._is_drawn:
                self._write(_ERASE)
                self._is_drawn = False
            num: int = original.write(text)
            original.flush()
            if text:
                self._is_mid_line = not text.endswith("\n")
            is_due = system_now() - self._drawn_at >= _REDRAW_SECS
            if self._bar and is_due and not self._is_mid_line and not self._is_closed:
                self._write(self._bar)
                self._is_drawn, self._drawn_at = True, system_now()
        return num

    def close(self) -> None:
        self._give_streams_back()
        with self._lock:
            self._is_closed = True
            if self._is_drawn:
                self._write(_ERASE)
                self._is_drawn = False
            if self._own is not None:
                self._own.close()

    def forget(self) -> None:
        self._lock = threading.RLock()
        self._is_closed, self._is_drawn = True, False
        streams, self._streams = self._streams, []
        for above in streams:
            if getattr(sys, above.name) is above:
                setattr(sys, above.name, above.original)
        for handler, above in self._handlers:
            # not setStream: it flushes, and takes a lock
            if handler.stream is above:
                handler.stream = above.original


class _Above:
    """Stands in for `sys.stdout` or `sys.stderr`: what is written goes above the bar."""

    def __init__(self, original: Any, name: str, surface: TerminalSurface) -> None:
        self.original = original
        self.name = name
        self._surface = surface

    def write(self, text: str) -> int:
        return self._surface.write_above(self.original, text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self.original.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):  # closed, or no stream
        return False


def _terminal_of(stream: Any) -> int | None:
    """Which terminal it writes to; 0 if it only says that it is one, None if it is none."""
    if not _is_terminal(stream):
        return None
    if sys.platform == "win32":  # a process has one console there
        return 0
    try:
        return os.fstat(stream.fileno()).st_rdev
    except (AttributeError, ValueError, OSError):
        return 0


def console_for(stream: object) -> Any:
    """A console of rich for this stream; None where bars cannot be drawn on it.

    Raises:
        ImportError: it is a terminal, and rich is not installed.
    """
    while isinstance(stream, _Above):
        stream = stream.original
    if stream is None or not _is_terminal(stream):
        return None
    try:
        cast(TextIO, stream).fileno()
    except (AttributeError, OSError, ValueError):
        return None
    from rich.console import Console

    console = Console(file=cast(TextIO, stream), highlight=False, markup=False, emoji=False)
    return None if not console.is_terminal or console.is_dumb_terminal else console


def _table(views: Sequence[View], console: Any, dot: str) -> Any:
    """What is shown: one row, or a table with a total and a row for each session."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    rows = rows_of(views)
    if console.width < _TABLE_WIDTH:
        heading = rows[0]
        assert isinstance(heading, View)
        return Text(line_of(heading, dot), no_wrap=True, overflow="ellipsis")
    num_shown = max(1, min(_MOST_ROWS, console.height - 4))
    folded, rows = rows[num_shown:], rows[:num_shown]
    table = Table.grid(padding=(0, 1), expand=True)
    has_names = any(each.name for each in rows)
    has_bar = any(isinstance(each, View) and each.limit for each in rows)
    for _ in range(2 if has_names else 1):
        table.add_column(no_wrap=True)
    table.add_column(ratio=1 if has_bar else None, min_width=4 if has_bar else 0)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=None if has_bar else 1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        name, phase, *rest = (Text(cell) for cell in cells_of(row, dot))
        bar: Any = ""
        if isinstance(row, View) and row.limit:
            bar = ProgressBar(total=row.limit, completed=min(row.step, row.limit))
        table.add_row(*([name] if has_names else []), phase, bar, *rest)
    parts = [folded_text(folded)] if folded else []
    if beside := counted(name for each in views for name in each.beside):
        parts.append("beside: " + ", ".join(beside))
    texts = [Text(each, style="dim", no_wrap=True, overflow="ellipsis") for each in parts]
    return Group(table, *texts)
