"""Display: draws the progress of sessions in a thread of its own, so that drawing holds up none.

Sessions of several event loops and threads have one terminal in common, so there is one table of
displays in the process, `DISPLAYS`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..._engine.background import BackgroundThread
from ..._engine.current import system_now
from ._rows import Row, Training
from ._surfaces import Surface

logger = logging.getLogger("asynchooks")

_JOIN_SECS = 1.0
"""How long the exit of the process waits for a terminal that takes nothing."""


class Display:
    """Shows the rows of several sessions on one surface, as long as there are any.

    Args:
        surface: what it is drawn on.
    """

    def __init__(self, surface: Surface) -> None:
        self.surface = surface
        self._lock = threading.Lock()  # guards the next three; not held while it is drawn
        self._has_begun = False
        self._rows: list[Row] = []
        self.is_over = False
        """The last row has gone, the process ends, or it is a fork of the one that draws."""
        self._thread = BackgroundThread("asynchooks-progress", self._serve)
        self.change = self._thread.ring
        """A row has changed: it shall be seen soon."""
        self._num_models = 0
        self._trainings: dict[object, Training] = {}
        self._has_failed = False

    def add(self, row: Row) -> bool:
        """Show this one, too; False if the last one has gone meanwhile."""
        with self._lock:
            if self.is_over:
                return False
            if not self._has_begun:
                self._thread.start()
            self._has_begun = True
            self._rows.append(row)
        return True

    def has_others(self, row: Row) -> bool:
        """Whether other sessions that train its model are shown."""
        with self._lock:
            return any(
                each.model is row.model is not None and each is not row and each.outcome is None
                for each in self._rows
            )

    def draw(self, now: float) -> None:
        """Draw once, at this time on the system's clock."""
        with self._lock:
            rows = list(self._rows)
        ended = [row for row in rows if row.outcome is not None]
        try:
            self._draw(rows, now)
        except Exception as error:
            if not self._has_failed and not self.is_over:
                self._has_failed = True
                logger.warning(
                    "The progress display failed and is off; training goes on", exc_info=error
                )
        with self._lock:
            self._rows = [row for row in self._rows if row not in ended]
            is_empty = not self._rows
            self.is_over = self.is_over or is_empty
        if is_empty:
            self._close()
        for row in rows:
            row.is_wanted = True
            if row in ended and row.on_shown is not None:
                row.on_shown()

    def _draw(self, rows: Sequence[Row], now: float) -> None:
        of_model: dict[object, list[Row]] = {}
        for row in rows:  # before its raw session was created it has no model
            of_model.setdefault(row.model or row, []).append(row)
        for key, its_rows in of_model.items():
            if key not in self._trainings:
                has_model = its_rows[0].model is not None
                self._num_models += has_model
                number = self._num_models if has_model else 0
                self._trainings[key] = Training(min(each.begun for each in its_rows), number)
        lines, last_lines = [], []
        for key, training in [*self._trainings.items()]:
            its_rows = of_model.get(key, [])
            is_numbered = self._num_models > 1 and training.number
            model = f"model {training.number}" if is_numbered else ""
            for row in its_rows:
                if row.outcome is not None:
                    training.end(row)
            if still_open := [each for each in its_rows if each.outcome is None]:
                lines.append(training.look(still_open, now, model))
                continue
            del self._trainings[key]
            if its_rows:  # else its raw session was created: it is another training now
                last_lines.append(training.last_line(now, model))
        if not self._has_failed:
            self.surface.draw(lines, last_lines, now)

    def _close(self) -> None:
        DISPLAYS.discard(self)
        try:
            self.surface.close()
        except Exception as error:  # a terminal that has gone
            logger.debug("The progress display could not be closed: %r", error)

    def _serve(self) -> None:
        self.draw(system_now())
        while not self.is_over and not self._thread.pause(self.surface.interval_secs):
            self.draw(system_now())

    def at_exit(self) -> None:
        """The process ends: put the terminal back."""
        self.is_over = True
        self._thread.end()
        if self._thread.join(_JOIN_SECS):
            self._close()

    def forget(self) -> None:
        self.is_over = True
        self._lock = threading.Lock()
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
                display = self._displays[place] = Display(make())
                display.add(row)
        return display

    def discard(self, display: Display) -> None:
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
