"""Where progress is shown: a terminal, by rich's `Live`; a notebook's output; lines in a file."""

from __future__ import annotations

import logging
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from typing import Any, TextIO

from ._rows import DOT, Line, below_of, folded_text

_MOST_LINES = 3
"""Of trainings at once that are written as a line each."""
_MOST_ROWS, _MOST_ROWS_IN_NOTEBOOK = 10, 32
_TABLE_WIDTH = 60
"""Columns of a terminal, at least, for a table; a narrower one gets a line."""
_HINT = "pip install 'asynchooks[progress]' for a progress bar here"
_CELL = '<td style="text-align:left;white-space:nowrap">{}</td>'


class Surface(ABC):
    """What a display draws on, in its own thread."""

    interval_secs: float
    """Seconds between two drawings."""

    def ask_every(self, secs: float) -> None:  # noqa: B027  # most have no lines to write
        """One of its users wants a line at least this often, where it shows lines."""

    @abstractmethod
    def draw(self, lines: Sequence[Line], last_lines: Sequence[str], now: float) -> None:
        """Show these trainings, and how others have ended; it may block."""

    def close(self) -> None:  # noqa: B027  # most have nothing to put back
        """There is nothing to show any more: put everything back as it was."""

    def forget(self) -> None:  # noqa: B027
        """In a forked process: touch nothing that is the parent's, and hold no lock."""


class PlainSurface(Surface):
    """Writes lines: at the start, every so many seconds, and at each end.

    Args:
        stream: where to; None for what `sys.stderr` is at that moment.
        hint: written once, before the first line; may be "".
    """

    interval_secs = 1.0

    def __init__(self, stream: TextIO | None = None, hint: str = "") -> None:
        self._stream, self._hint = stream, hint
        self._every_secs = math.inf
        self._due_at = -math.inf

    def ask_every(self, secs: float) -> None:
        self._every_secs = min(self._every_secs, secs)
        self.interval_secs = min(1.0, self._every_secs)

    def draw(self, lines: Sequence[Line], last_lines: Sequence[str], now: float) -> None:
        texts = list(last_lines)
        lines = [each for each in lines if each.is_open]
        if lines and now >= self._due_at:
            self._due_at = now + self._every_secs
            texts += [each.text() for each in lines[:_MOST_LINES]]
            if folded := lines[_MOST_LINES:]:
                texts.append(folded_text(folded))
        stream = self._stream or sys.stderr
        if texts and stream is not None:  # a program without a console has none
            hint, self._hint = self._hint, ""
            text = "".join(f"{each}\n" for each in ([hint] if hint else []) + texts)
            encoding = getattr(stream, "encoding", None) or "utf-8"
            try:
                text.encode(encoding)
            except UnicodeError:
                text = text.replace(DOT, ", ").encode(encoding, "replace").decode(encoding)
            stream.write(text)
            stream.flush()


class TerminalSurface(Surface):
    """A bar at the bottom of a terminal; what is printed and logged goes above it.

    The cursor is never hidden: a process that is killed leaves a terminal that works.

    Args:
        console: of rich.
        own: its file, to be closed with the surface: a buffer that is shared with other code would
            hold up the end of the process, where the terminal takes nothing.
    """

    interval_secs = 0.25

    def __init__(self, console: Any, own: TextIO | None = None) -> None:
        from rich.live import Live

        self._console, self._own = console, own
        console.show_cursor = lambda show=True: False  # Live would hide it
        # the streams are redirected here: Live would leave them alone where the display of the
        # last session is just being closed, and redirect what goes to another terminal
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._terminal = _terminal_of(console.file)
        self._taken: list[tuple[str, Any, Any]] = []  # streams of sys: name, original, stand-in
        self._handlers: list[tuple[Any, Any, Any]] = []  # of logging: with original and stand-in

    def draw(self, lines: Sequence[Line], last_lines: Sequence[str], now: float) -> None:
        self._live.start()  # does nothing but the first time
        self._take_streams()
        for line in last_lines:
            self._console.print(line, soft_wrap=True)
        self._live.update(_table(lines, self._console) if lines else "", refresh=True)

    def _take_streams(self) -> None:
        from rich.file_proxy import FileProxy

        for name in ("stdout", "stderr"):
            original = getattr(sys, name)
            if isinstance(original, FileProxy) or _terminal_of(original) != self._terminal:
                continue
            proxy = FileProxy(self._console, original)
            self._taken.append((name, original, proxy))
            setattr(sys, name, proxy)
        for logger in (logging.getLogger(), logging.getLogger("asynchooks")):
            for handler in logger.handlers:
                for _, original, proxy in self._taken:
                    if getattr(handler, "stream", None) is original:
                        with suppress(AttributeError):  # its own, or a property
                            handler.setStream(proxy)  # type: ignore[attr-defined]
                            self._handlers.append((handler, original, proxy))

    def close(self) -> None:
        for handler, original, proxy in self._handlers:
            if handler.stream is proxy:
                handler.setStream(original)
        self.forget()
        try:
            self._live.stop()
        finally:
            if self._own is not None:
                self._console.file = sys.stderr  # other code may have kept a stand-in
                self._own.close()

    def forget(self) -> None:
        for name, original, proxy in self._taken:
            if getattr(sys, name) is proxy:
                setattr(sys, name, original)
        for handler, original, proxy in self._handlers:
            if handler.stream is proxy:
                handler.stream = original  # not setStream: it flushes, and takes a lock
        self._taken, self._handlers = [], []


class NotebookSurface(Surface):
    """One output, in the cell in which the first session opened; other cells may run meanwhile.

    It needs IPython alone, and no widgets. Make it in the cell's own thread.
    """

    interval_secs = 0.5

    def __init__(self) -> None:
        from IPython.display import display

        self._last_lines: list[str] = []
        self._shown = self._bundle([])
        self._handle: Any = display(self._shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def draw(self, lines: Sequence[Line], last_lines: Sequence[str], now: float) -> None:
        self._last_lines = [*self._last_lines, *last_lines][-_MOST_ROWS_IN_NOTEBOOK:]
        bundle = self._bundle(lines)
        if self._handle is not None and bundle != self._shown:
            self._shown = bundle
            self._handle.update(bundle, raw=True)

    def _bundle(self, lines: Sequence[Line]) -> dict[str, str]:
        """The same by type: HTML, and text for what shows no HTML."""
        most = _MOST_ROWS_IN_NOTEBOOK
        texts = [*self._last_lines, *(each.text() for each in lines[:most])]
        table = f"<table>{''.join(map(_html_of, lines[:most]))}</table>" if lines else ""
        html = [f"<div>{escape(each)}</div>" for each in self._last_lines]
        html += [table, *(f"<div>{escape(each)}</div>" for each in below_of(lines, lines[most:]))]
        return {"text/html": "".join(html), "text/plain": "\n".join(texts)}

    def forget(self) -> None:
        self._handle = None


def _html_of(line: Line) -> str:
    name, phase, *rest = map(escape, line.cells())
    bar = ""
    if line.limit:
        bar = f'<progress max="{line.limit}" value="{min(line.step, line.limit)}"></progress>'
    return "<tr>" + "".join(_CELL.format(cell) for cell in (name, phase, bar, *rest)) + "</tr>"


def surface_for(file: TextIO | None) -> Surface:
    """What fits the stream; None: standard error, or the notebook in which this runs."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if file is None and getattr(shell, "kernel", None) is not None:
        return NotebookSurface()
    stream: Any = file or sys.stderr
    if _terminal_of(stream) is None:
        return PlainSurface(file)
    try:
        from rich.console import Console
    except ImportError:
        return PlainSurface(file, _HINT)
    try:
        descriptor = os.dup(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return PlainSurface(file)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    own = os.fdopen(descriptor, "w", encoding=encoding, errors="replace", newline="")
    console = Console(file=own, highlight=False, markup=False, emoji=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalSurface(console, own)
    own.close()
    return PlainSurface(file)


def _terminal_of(stream: Any) -> int | None:
    """Which terminal it writes to; 0 if it only says that it is one, None if it is none."""
    try:
        if not stream.isatty():
            return None
    except (AttributeError, ValueError, OSError):  # closed, or no stream
        return None
    if sys.platform == "win32":  # a process has one console there
        return 0
    try:
        return os.fstat(stream.fileno()).st_rdev
    except (AttributeError, ValueError, OSError):
        return 0


def _table(lines: Sequence[Line], console: Any) -> Any:
    """A row for each training."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if console.width < _TABLE_WIDTH:
        return Text(lines[0].text(), no_wrap=True, overflow="ellipsis")
    num_shown = max(1, min(_MOST_ROWS, console.height - 4))
    folded, rows = lines[num_shown:], lines[:num_shown]
    has_bar = any(each.limit for each in rows)
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(2 if any(each.name for each in rows) else 1):
        table.add_column(no_wrap=True)
    table.add_column(ratio=1 if has_bar else None, min_width=4 if has_bar else 0)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=None if has_bar else 1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        *names, phase, steps, rate, left, values = (Text(cell) for cell in row.cells())
        bar = ProgressBar(row.limit, min(row.step, row.limit)) if row.limit else ""
        cells = [*names, phase, bar, steps, rate, left, values]
        table.add_row(*cells[-len(table.columns) :])
    below = below_of(lines, folded)
    texts = [Text(each, style="dim", no_wrap=True, overflow="ellipsis") for each in below]
    return Group(table, *texts)
