"""Display: draws the progress of sessions in a thread of its own, so that drawing holds up none.

Sessions of several event loops and threads have one terminal in common, so there is one table of
displays in the process, `DISPLAYS`. What a display draws on is a `Surface`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ..._engine.current import system_now
from ._rows import Row, Training, View

logger = logging.getLogger("asynchooks")

_JOIN_SECS = 1.0
"""How long the exit of the process waits for a terminal that takes nothing."""


class Surface(ABC):
    """Where progress is shown: a terminal, lines in a file, or a notebook."""

    interval_secs: float
    """Seconds between two drawings."""

    def ask_every(self, secs: float) -> None:  # noqa: B027  # most have no lines to write
        """One of its users wants a line at least this often, where it shows lines."""

    @abstractmethod
    def draw(self, views: Sequence[View], last_lines: Sequence[str], now: float) -> None:
        """Show these trainings, and how others have ended; it may block."""

    @property
    def dot(self) -> str:
        """What stands between two parts of a line."""
        return " · "

    @abstractmethod
    def close(self) -> None:
        """There is nothing to show any more: put everything back as it was."""

    @abstractmethod
    def forget(self) -> None:
        """In a forked process: touch nothing that is the parent's, and hold no lock."""


class Display:
    """Shows the rows of several sessions on one surface, as long as there are any.

    Args:
        surface: what it is drawn on.
        has_thread: whether a thread draws; tests call `draw` themselves.
        on_empty: called when the last row has gone, and the display is of no more use.
    """

    def __init__(
        self,
        surface: Surface,
        *,
        has_thread: bool = True,
        on_empty: Callable[[Display], None] | None = None,
    ) -> None:
        self.surface = surface
        self._has_thread = has_thread
        self._on_empty = on_empty
        self._lock = threading.Lock()  # guards the next three
        self._rows: list[Row] = []
        self._is_used_up = False
        self._thread: threading.Thread | None = None
        self._drawing = threading.Lock()  # held while it is drawn; guards the next two
        self._num_models = 0
        self._trainings: dict[object, Training] = {}
        self._is_changed = threading.Event()
        self._has_failed = False
        self.is_over = False
        """The process ends, or is a fork of the one that draws."""

    def add(self, row: Row) -> bool:
        """Show this one, too; False if the last one has gone meanwhile."""
        with self._lock:
            if self._is_used_up or self.is_over:
                return False
            self._rows.append(row)
            if self._has_thread and self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="asynchooks-progress", daemon=True
                )
                self._thread.start()
        return True

    def has_others(self, row: Row) -> bool:
        """Whether other sessions that train its model are shown."""
        with self._lock:
            return any(
                each.key is row.key and each is not row and each.outcome is None
                for each in self._rows
            )

    def change(self) -> None:
        """A row has changed: it shall be seen soon."""
        self._is_changed.set()

    def draw(self, now: float) -> None:
        """Draw once, at this time on the system's clock."""
        with self._lock:
            rows = list(self._rows)
        ended = [row for row in rows if row.outcome is not None]
        try:
            with self._drawing:
                self._draw(rows, ended, now)
        except Exception as error:
            if not self._has_failed and not self.is_over:
                self._has_failed = True
                logger.warning(
                    "The progress display failed and is off; training goes on", exc_info=error
                )
        with self._lock:
            self._rows = [row for row in self._rows if row not in ended]
            self._is_used_up = is_empty = not self._rows
        if is_empty:
            self._close()
            if self._on_empty is not None:
                self._on_empty(self)
        for row in rows:
            row.is_wanted = True
            if row in ended and row.on_shown is not None:
                row.on_shown()

    def _draw(self, rows: Sequence[Row], ended: Sequence[Row], now: float) -> None:
        open_rows: dict[object, list[Row]] = {}
        for row in rows:
            # a row has no model before its raw session was created
            if row.key is not row and row in self._trainings:
                del self._trainings[row]
            training = self._trainings.setdefault(row.key, Training(row.begun))
            if row.key is not row and not training.number:
                self._num_models += 1
                training.number = self._num_models
            if row.outcome is None:
                open_rows.setdefault(row.key, []).append(row)
            else:
                training.end(row)
        keys = {row.key for row in ended} - open_rows.keys()
        trainings = [self._trainings.pop(key) for key in list(self._trainings) if key in keys]
        views = [
            self._trainings[key].look(each, now, self._model(self._trainings[key]))
            for key, each in open_rows.items()
        ]
        if not self._has_failed:
            dot = self.surface.dot
            last = [each.last_line(now, dot, self._model(each)) for each in trainings]
            self.surface.draw(views, last, now)

    def _model(self, training: Training) -> str:
        return f"model {training.number}" if self._num_models > 1 and training.number else ""

    def _close(self) -> None:
        try:
            with self._drawing:
                self.surface.close()
        except Exception as error:  # a terminal that has gone
            logger.debug("The progress display could not be closed: %r", error)

    def _serve(self) -> None:
        while not (self.is_over or self._is_used_up):
            self._is_changed.clear()
            self.draw(system_now())
            if not self._is_used_up:
                self._is_changed.wait(self.surface.interval_secs)

    def at_exit(self) -> None:
        """The process ends: put the terminal back."""
        thread, self.is_over = self._thread, True
        self._is_changed.set()
        if thread is not None:
            thread.join(_JOIN_SECS)
            if not thread.is_alive():
                self._close()

    def forget(self) -> None:
        self.is_over, self._thread = True, None
        self._lock, self._drawing = threading.Lock(), threading.Lock()
        self.surface.forget()


class Displays:
    """The displays of this process, one for each place; they come and go with their sessions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next one
        self._displays: dict[Any, Display] = {}  # by place

    def add(self, row: Row, place: Any, make: Callable[[], Surface]) -> Display:
        """Show the row on the display of this place, a new one if there is none.

        Args:
            place: hashable; what sessions that share a display have in common.
            make: makes the surface of a new one.
        """
        with self._lock:
            display = self._displays.get(place)
            if display is None or not display.add(row):
                display = self._displays[place] = Display(make(), on_empty=self._discard)
                display.add(row)
        return display

    def put(self, place: Any, display: Display) -> None:
        """Have sessions that open at this place shown on this display."""
        with self._lock:
            self._displays[place] = display

    def _discard(self, display: Display) -> None:
        with self._lock:
            for place, each in list(self._displays.items()):
                if each is display:
                    del self._displays[place]

    def at_exit(self) -> None:
        for display in list(self._displays.values()):
            display.at_exit()

    def forget(self) -> None:
        """In a forked process: the displays, and the threads that draw them, are the parent's."""
        displays, self._displays = self._displays, {}
        self._lock = threading.Lock()
        for display in displays.values():
            display.forget()


DISPLAYS = Displays()
atexit.register(DISPLAYS.at_exit)
if sys.platform != "win32":
    os.register_at_fork(after_in_child=DISPLAYS.forget)
