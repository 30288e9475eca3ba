"""Output of hooks for TensorBoard: a writer that the user gives, or the one of a directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .. import _check
from .._engine.current import current_engine
from .._engine.recording import current_stand_in
from .._engine.threads import run_blocking
from .._hook import SessionRunHook, begin_graph
from .._running.hook_state import TimerState
from .._timer import timer_of
from ..metrics._event_files import (
    EVENT_FILES,
    EventFileWriter,
    cached_by_tensorflow,
    scalar_summary,
    serialized,
    session_start,
    tensorflows_writer,
)

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
    """The output of one hook: a given writer, which stays open, or one in a directory, or none."""

    def __init__(self, directory: str | None, writer: Any) -> None:
        self._given = directory
        self._directory = _check.place("output_dir", directory) if directory else None
        self.writer: Any = writer
        self._own: EventFileWriter | None = None
        self._is_muted = False
        self._serializes = False  # the writer is TensorFlow's, and messages are TensorBoard's

    def open(self) -> None:
        """In the hook's begin.

        In a TensorFlow graph the writer is TensorFlow's cached one, which TensorFlow's hooks use,
        too, and which must not be closed. Elsewhere it needs no TensorFlow and waits for no disk,
        unless TensorFlow's cache has a writer of the directory. Hooks of one directory share it.
        ImportError: TensorBoard is not installed (says what to install).
        """
        self._is_muted = current_stand_in() is not None  # a plan writes nothing
        if self.writer is not None or not self._directory or self._is_muted:
            return
        if begin_graph.get() is not None:
            # which knows it by the name that it was given
            given = _check.same_place(str(self._given), self._directory)
            self.writer = tensorflows_writer(given)
        else:
            # relative names in the cache may belong to another working directory
            self.writer = cached_by_tensorflow(self._directory, only_absolute=True)
            self._serializes = self.writer is not None
            if self.writer is None:
                self.writer = self._own = EVENT_FILES.open(self._directory)

    def add_summary(self, summary: Any, step: int) -> None:
        """Write a summary of the step; there must be a writer."""
        self.writer.add_summary(serialized(summary) if self._serializes else summary, step)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write one scalar of the step, where there is a writer."""
        if self.writer is not None and not self._is_muted:
            self.add_summary(scalar_summary(tag, value), step)

    def add_start(self, step: int) -> None:
        """Write that a session has begun: TensorBoard then hides what was of this step or later.

        A sink of metrics in the same directory does that before the first step. After it, this
        would hide the points that the sink has written meanwhile.
        """
        if not (self._directory and EVENT_FILES.has_purger(self._directory)):
            self.writer.add_session_log(session_start(), step)

    async def finish(self) -> None:
        """At any end of the session; waits for the disk off the event loop."""
        if self.writer is not None and not self._is_muted:
            name = "asynchooks-flush"
            await run_blocking(current_engine(), self._flush, _GRACE_SECS, name)

    def _flush(self) -> None:
        own, self._own = self._own, None
        try:
            self.writer.flush()
        finally:
            if own is not None:
                self.writer = None
                EVENT_FILES.close(own)


class TimedOutputHook(SessionRunHook):
    """Base of hooks that write to `_output` when `_timer` is due, by the named intervals."""

    needs_global_step = True

    def __init__(self, output_dir: str | None, writer: Any, **intervals: float | None) -> None:
        self._timer = timer_of(**intervals)
        self._output = Output(output_dir, writer)

    async def begin(self) -> None:
        self._output.open()

    def state_dict(self) -> dict[str, Any]:
        return TimerState({"timer": self._timer.state_dict()}, place=repr(self._timer))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._timer.load_state_dict(state["timer"])

    async def end(self, session: Any) -> None:
        await self._finish()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self._finish()

    async def _finish(self) -> None:
        await self._output.finish()
