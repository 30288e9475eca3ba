"""Output of hooks for TensorBoard: a writer that the user gives, or the one of a directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .. import _check
from .._engine.current import current_engine
from .._engine.recording import current_stand_in
from .._engine.threads import run_blocking
from .._hook import SessionRunHook, begin_graph
from .._log import fields
from .._running.hook_state import TimerState
from .._stopping.coordinator import Coordinator
from .._timer import timer_of
from ..metrics._event_files import (
    Events,
    errors_of_writing,
    scalar_summary,
    serialized,
    session_start,
)

logger = logging.getLogger("asynchooks")

_GRACE_SECS = 30.0
"""What a cancellation gives to the last write."""


class SummaryWriter(Protocol):
    """Writes summaries: TensorFlow's `FileWriter` is one.

    Example:
        class Kept:  # in a list
            def __init__(self):
                self.rates = []

            def add_summary(self, summary, global_step):
                self.rates.append((global_step, summary))

            def flush(self):
                pass

        hook = StepCounterHook(every_n_steps=10, summary_writer=Kept())
    """

    def add_summary(self, summary: Any, global_step: int) -> None: ...

    def flush(self) -> None: ...


class EventWriter(SummaryWriter, Protocol):
    """Writes the start of a session, too: TensorFlow's `FileWriter` is one.

    Example:
        class Kept:  # in a list
            def __init__(self):
                self.summaries, self.num_sessions = [], 0

            def add_summary(self, summary, global_step):
                self.summaries.append((global_step, summary))

            def add_session_log(self, session_log, global_step):
                self.num_sessions += 1

            def flush(self):
                pass

        hook = SummarySaverHook(save_steps=10, summary_op="loss", summary_writer=Kept())
    """

    def add_session_log(self, session_log: Any, global_step: int) -> None: ...


class Output:
    """The output of one hook: a given writer, which stays open, or one in a directory, or none.

    In a directory it does what a sink of metrics does: an error of the disk is logged once, and
    training goes on; and what TensorBoard would show twice after a resume is hidden. An error of a
    writer that the user gave is raised.
    """

    def __init__(self, directory: str | None, writer: Any) -> None:
        self._given = directory
        self.directory = _check.place("output_dir", directory) if directory else None
        self._given_writer = writer
        self.writer: Any = writer
        """None: there is nothing to write to."""
        self._events: Events | None = None  # in the directory, where no writer is given
        self._is_of_graph = self._has_failed = False
        self._last_step = 0  # that was written

    def open(self) -> None:
        """In the hook's begin.

        In a TensorFlow graph the writer is TensorFlow's cached one, which TensorFlow's hooks use,
        too, and which must not be closed. Elsewhere it needs no TensorFlow and waits for no disk.
        Hooks of one directory share it.
        ImportError: TensorBoard is not installed (says what to install).
        """
        self._has_failed, self._events = False, None
        is_planned = current_stand_in() is not None  # a plan writes nothing
        self.writer = None if is_planned else self._given_writer
        if self._given_writer is not None or not self.directory or is_planned:
            return
        self._is_of_graph = begin_graph.get() is not None
        events = self._events = Events(self.directory)
        # TensorFlow knows it by the name that it was given
        name = _check.same_place(str(self._given), self.directory) if self._is_of_graph else ""
        self.attempt(None, events.open, name)
        self.writer = events.writer

    def begin(self, step: int) -> None:
        """A raw session was created, at this step: TensorBoard hides what is there of later ones.

        On a graph the step variable may be restored later, and TensorFlow's hooks leave this to
        `add_start` of one of them.
        """
        events = self._events
        if events is None or not events.is_open or self._is_of_graph:
            return
        if not events.has_begun:
            self.attempt(step, events.begin, step)
        elif self._last_step > step:  # the session was lost, and goes back
            self.attempt(step, events.hide_after, step)
        self._last_step = step

    def add_summary(self, summary: Any, step: int) -> None:
        """Write a summary of the step; there must be a writer."""
        if self._events is None:
            self.writer.add_summary(summary, step)
            return
        self._last_step = max(self._last_step, step)
        # TensorFlow's writer may be of another library than the message
        self.attempt(step, self.writer.add_summary, serialized(summary), step)

    def attempt(self, step: int | None, write: Callable[..., object], *args: Any) -> None:
        """Write to the directory; the first error of the disk is logged."""
        try:
            write(*args)
        except errors_of_writing() as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "Events could not be written into %s, and are lost; more may be. Training "
                    "goes on: %r",
                    self.directory,
                    error,
                    extra=fields("TensorBoard", step=step, reason=repr(error)),
                )

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write one scalar of the step, where there is a writer."""
        if self.writer is not None:
            self.add_summary(scalar_summary(tag, value), step)

    def add_start(self, step: int) -> None:
        """Write that a session has begun: TensorBoard then hides what was of this step or later.

        In a directory where `begin` or a sink of metrics has done that, it would hide what was
        written since.
        """
        if self._events is None:
            self.writer.add_session_log(session_start(), step)
        elif not self._events.others_have_begun:
            self.attempt(step, self.writer.add_session_log, session_start(), step)

    def drop(self) -> None:
        """The session was dropped; waits for nothing, takes no lock."""
        if self._events is not None:
            self._events.is_dropped = True
            self.writer = None

    async def finish(self) -> None:
        """At any end of the session; waits for the disk off the event loop."""
        if self.writer is not None:
            name = "asynchooks-flush"
            await run_blocking(current_engine(), self._flush, _GRACE_SECS, name)

    def _flush(self) -> None:
        if self._events is None:
            self.writer.flush()
            return
        self.writer = None
        self.attempt(None, self._events.close)


class TimedOutputHook(SessionRunHook):
    """Base of hooks that write to `_output` when `_timer` is due, by the named intervals."""

    needs_global_step = True

    def __init__(self, output_dir: str | None, writer: Any, **intervals: float | None) -> None:
        self._timer = timer_of(**intervals)
        self._output = Output(output_dir, writer)
        self._is_opening = False  # a session; false where it recovers

    async def begin(self) -> None:
        self._is_opening = True
        self._output.open()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        step = session.global_step.value
        if self._is_opening:
            self._is_opening = False
            self._timer.begin_session(step)
        self._output.begin(step)

    def state_dict(self) -> dict[str, Any]:
        return TimerState({"timer": self._timer.state_dict()}, place=repr(self._timer))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._timer.load_state_dict(state["timer"])

    async def end(self, session: Any) -> None:
        await self._finish()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self._finish()

    def on_drop(self) -> None:
        self._output.drop()

    async def _finish(self) -> None:
        await self._output.finish()
