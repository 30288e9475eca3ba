"""The lines of all processes, merged on stdout, and a line of progress on stderr.

Lines are bytes, not decoded; only the number of a step is looked for in them.
"""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TextIO

import anyio

from .._engine.current import current_engine
from .._engine.threads import WorkThread

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_LINE = 1 << 26
"""Bytes that may wait for the end of their line; a longer line is cut there."""
_COLORS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
_AS_BEFORE, _ERASE = b"\x1b[0m", b"\r\x1b[2K"
_STEP = re.compile(rb"\b(?:global[ _])?step[\"']?[ =:]{1,3}(\d+)", re.IGNORECASE)
_GRACE_SECS = 0.5
"""For a write that is under way at the end; it may be stuck."""
_READ_FOR_STEP = 4096
"""Bytes of the newest output in which a step is looked for."""


class Lines:
    """Joins pieces of output to whole lines."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> bytes:
        """The whole lines that there are now; empty if there is none."""
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            whole = b"".join([*self._rest, whole, newline])
            self._rest, self._size = [], 0
        self._rest.append(rest)
        self._size += len(rest)
        return whole + self.end() if self._size > LONGEST_LINE else whole

    def end(self) -> bytes:
        """The last line, which may have come without its end; empty if there is none."""
        rest = b"".join(self._rest)
        self._rest, self._size = [], 0
        return rest + b"\n" if rest else b""


class Output:
    """The launcher's output; the launcher makes it and closes it.

    A thread writes, one call at a time: a stopped terminal, or a slow reader, makes the processes
    wait, but does not delay a signal.

    Args:
        names: of all tasks; prefixes are as long as the longest.
        progress: returns the text about the run, without the step; called at each drawing.
    """

    def __init__(self, names: Sequence[str], progress: Callable[[], str]) -> None:
        self._progress = progress
        self._lock = anyio.Lock()  # first come, first served: lines keep the order of arrival
        self._thread = WorkThread(current_engine(), "asynchooks-output")
        self._stdout = sys.stdout.fileno()
        self._stderr = sys.stderr.fileno()
        colored, self._screen = _console(sys.stdout), _console(sys.stderr)
        self._line_end = b"\n" if colored is None else _AS_BEFORE + b"\n"
        width = max(map(len, names))
        self._prefixes: dict[str, bytes] = {}
        for index, name in enumerate(names):
            prefix = f"{name:<{width}} | "
            if colored is not None:
                prefix = _rendered(colored, prefix, _COLORS[index % len(_COLORS)])
            self._prefixes[name] = prefix.encode()
        self._step: int | None = None
        self._is_drawn = False

    @property
    def has_progress(self) -> bool:
        return self._screen is not None

    async def show(self, name: str, lines: bytes) -> None:
        """Write whole lines of a task; OSError if stdout cannot be written to."""
        if not lines:
            return
        if self.has_progress:
            found = _STEP.findall(lines, max(0, len(lines) - _READ_FOR_STEP))
            # Python raises an error for numbers with thousands of digits
            self._step = int(found[-1][-18:]) if found else self._step
        prefix, end = self._prefixes[name], self._line_end
        data = prefix + lines[:-1].replace(b"\n", end + prefix) + end
        await self._call(partial(self._write, data))

    async def draw(self) -> None:
        """Draw the line of progress again, if there is one."""
        if self.has_progress:
            await self._call(self._draw)

    def say(self, lines: bytes) -> None:
        """Write the launcher's own lines to stderr, at once; a closed terminal is ignored."""
        erased = _ERASE if self._is_drawn else b""
        self._is_drawn = False
        _write_all(self._stderr, erased + lines.rstrip(b"\n") + b"\n", is_needed=False)

    def close(self) -> None:
        """Erase the line of progress; a write that is under way is not awaited."""
        self._erase()
        self._thread.close()

    async def _call(self, fn: Callable[[], None]) -> None:
        async with self._lock:
            await self._thread.run(fn, _GRACE_SECS)

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            _write_all(self._stderr, _ERASE, is_needed=False)

    def _write(self, data: bytes) -> None:
        self._erase()
        _write_all(self._stdout, data)
        if self.has_progress:
            self._draw()

    def _draw(self) -> None:
        assert self._screen is not None
        step = "" if self._step is None else f", step {self._step} was printed last"
        line = _rendered(self._screen, self._progress() + step, "dim")
        self._is_drawn = True
        _write_all(self._stderr, _ERASE + line.encode(), is_needed=False)


def _write_all(fd: int, data: bytes, is_needed: bool = True) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another program made the terminal's file non-blocking, for all
            select.select([], [fd], [])
        except OSError:
            if is_needed:
                raise
            return


def _console(stream: TextIO) -> Console | None:
    """For a terminal that can do more than print, if rich is there."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream)
    return None if console.is_dumb_terminal else console


def _rendered(console: Console, text: str, style: str) -> str:
    """In the style, and no wider than the terminal."""
    from rich.text import Text

    with console.capture() as captured:
        shown = Text(text, style=style, no_wrap=True, overflow="crop")
        console.print(shown, end="", crop=True, soft_wrap=False)
    return captured.get()
