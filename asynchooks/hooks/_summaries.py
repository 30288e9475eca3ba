"""Writing for TensorBoard, through TensorBoard's own writer or TensorFlow's."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from .._engine import current_engine
from .._hook import begin_graph
from .._work_thread import run_blocking

_GRACE_SECS = 30.0
"""What a cancellation gives to the last write."""


class SummaryWriter(Protocol):
    """What takes summaries: TensorFlow's `FileWriter` is one."""

    def add_summary(self, summary: Any, global_step: int) -> None: ...

    def flush(self) -> None: ...


class EventWriter(SummaryWriter, Protocol):
    """What takes the beginning of a session, too: TensorFlow's `FileWriter` is one."""

    def add_session_log(self, session_log: Any, global_step: int) -> None: ...


class Output:
    """Where one hook writes: to the writer that it was given, or to a directory, or nowhere.

    Args:
        directory: for an event file, if no writer is given.
        writer: stays open; None opens one in the directory.
    """

    def __init__(self, directory: str | None, writer: Any) -> None:
        self._directory = directory
        self.writer: Any = writer
        self._own: EventFileWriter | None = None

    def open(self) -> None:
        """In the hook's begin.

        In a TensorFlow graph the writer is TensorFlow's cached one, which hooks of one directory
        share and must not close. Elsewhere it is TensorBoard's, which needs no TensorFlow.

        Raises:
            ImportError: neither is installed (says what to install).
        """
        if self.writer is not None or not self._directory:
            return
        if begin_graph.get() is not None:
            cache = sys.modules["tensorflow"].compat.v1.summary.FileWriterCache
            self.writer = cache.get(self._directory)
        else:
            self.writer = self._own = EventFileWriter(self._directory)

    async def finish(self) -> None:
        """At the end of the session, however it ends; waits for the disk off the event loop."""
        if self.writer is not None:
            name = "asynchooks-flush"
            await run_blocking(current_engine(), self._flush, _GRACE_SECS, name)

    def _flush(self) -> None:
        own, self._own = self._own, None
        try:
            self.writer.flush()
        finally:
            if own is not None:
                self.writer = None
                own.close()


def scalar_summary(tag: str, value: float) -> Any:
    """One scalar as a summary message."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None:
        summary = tensorflow.compat.v1.Summary
    else:
        from tensorboard.compat.proto import summary_pb2

        summary = summary_pb2.Summary
    return summary(value=[summary.Value(tag=tag, simple_value=value)])


def session_start() -> Any:
    """The message that says that a session has begun."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None:
        session_log = tensorflow.compat.v1.SessionLog
    else:
        from tensorboard.compat.proto import event_pb2

        session_log = event_pb2.SessionLog
    return session_log(status=session_log.START)


class EventFileWriter:
    """TensorBoard's event file writer under the methods that hooks use. Close it."""

    def __init__(self, directory: str) -> None:
        try:
            from tensorboard.summary.writer import event_file_writer
        except ImportError as error:
            raise ImportError(
                f"writing events to {directory!r} needs TensorBoard's writer: "
                "pip install 'asynchooks[tensorboard]', or give a summary_writer of your own"
            ) from error
        self._writer = event_file_writer.EventFileWriter(directory)

    def add_summary(self, summary: Any, global_step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(global_step, summary=Summary.FromString(_serialized(summary)))

    def add_session_log(self, session_log: Any, global_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(global_step, session_log=SessionLog.FromString(_serialized(session_log)))

    def _add(self, step: int, **what: Any) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event

        # the file format wants the wall clock, which no engine has
        self._writer.add_event(Event(wall_time=time.time(), step=step, **what))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _serialized(message: Any) -> bytes:
    is_bytes = isinstance(message, bytes)
    data: bytes = message if is_bytes else message.SerializeToString()
    return data
