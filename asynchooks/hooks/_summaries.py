"""Writing for TensorBoard, through TensorBoard's own writer or TensorFlow's; one file a directory.

TensorBoard reads the event files of a directory one after the other, and none again that it has
left: of two that grow at once it drops points.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Protocol

from .._engine.current import current_engine
from .._engine.threads import run_blocking
from .._hook import begin_graph

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

        In a TensorFlow graph the writer is TensorFlow's cached one, which TensorFlow's hooks use,
        too, and which must not be closed. Elsewhere it is TensorBoard's, which needs no TensorFlow,
        unless the directory has one of TensorFlow's already. Hooks of one directory share it.

        Raises:
            ImportError: neither is installed (says what to install).
        """
        if self.writer is not None or not self._directory:
            return
        if begin_graph.get() is not None:
            self.writer = tensorflows_writer(self._directory)
        else:
            # a relative name there may be of another working directory
            cached = _cached_by_tensorflow(self._directory, only_absolute=True)
            self.writer = None if cached is None else _Serializing(cached)
            if self.writer is None:
                self.writer = self._own = _EVENT_FILES.open(self._directory)

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
                _EVENT_FILES.close(own)


def tensorflows_writer(directory: str) -> Any:
    """TensorFlow's cached writer of the directory, which its own hooks share; do not close it.

    With a graph as the default one, as TensorFlow writes no events where execution is eager. One
    that its user has closed is opened again, into a new file.
    """
    writer = _cached_by_tensorflow(directory)
    if writer is None:
        writer = sys.modules["tensorflow"].compat.v1.summary.FileWriterCache.get(directory)
    return writer


def _cached_by_tensorflow(directory: str, *, only_absolute: bool = False) -> Any:
    """The writer that TensorFlow's cache holds of the directory, however that is spelled there.

    The cache's table is private: tested with TensorFlow 2.16, 2.18 and 2.21.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return None
    cache, place = tensorflow.compat.v1.summary.FileWriterCache, _place(directory)
    with cache._lock:
        keys = [key for key in cache._cache if not only_absolute or _is_absolute(key)]
        writers = [cache._cache[key] for key in keys if _place(key) == place]
    if not writers:
        return None
    writers[0].reopen()  # only does something if it was closed
    return writers[0]


class _Serializing:
    """TensorFlow's writer, where summaries may be messages of TensorBoard's, not TensorFlow's."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.add_session_log = writer.add_session_log
        self.flush = writer.flush

    def add_summary(self, summary: Any, global_step: int) -> None:
        self._writer.add_summary(_serialized(summary), global_step)


def _is_absolute(directory: Any) -> bool:
    path = os.fsdecode(directory)
    return "://" in path or os.path.isabs(path)


def _place(directory: Any) -> str:
    """The same for every spelling of a directory."""
    path = os.fsdecode(directory)
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


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
    """TensorBoard's event file writer under the methods that hooks use; `EventFiles` makes it.

    Any thread may call it.
    """

    def __init__(self, directory: str) -> None:
        try:
            from tensorboard.summary.writer import event_file_writer
        except ImportError as error:
            raise ImportError(
                f"writing events to {directory!r} needs TensorBoard's writer: "
                "pip install 'asynchooks[tensorboard]', or give a summary_writer of your own"
            ) from error
        before = _event_files_in(directory)
        self._writer = event_file_writer.EventFileWriter(directory)
        # A name ends with the second and a count, 9 before 10: within a second it may sort before
        # an earlier file, and would be read before that.
        while before and max(_event_files_in(directory) - before) < max(before):
            (name,) = _event_files_in(directory) - before
            self._writer.close()
            os.remove(os.path.join(directory, name))
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


class EventFiles:
    """The open event files of this process, one for each directory.

    Hooks of several sessions, event loops and threads have nothing else in common, so there is one
    table in the process, as TensorFlow has its `FileWriterCache`. Unlike that, it closes a file
    when its last user has gone; who comes later gets a new one. So does a forked process.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked process: the files, and the threads that write them, are the parent's."""
        self._lock = threading.Lock()  # guards the next one
        self._open: dict[str, tuple[EventFileWriter, int]] = {}  # and how many use it, by place

    def open(self, directory: str) -> EventFileWriter:
        """The writer of the directory, to be given back by `close`."""
        place = _place(directory)
        with self._lock:
            writer, num_users = self._open.get(place) or (EventFileWriter(directory), 0)
            self._open[place] = writer, num_users + 1
        return writer

    def close(self, writer: EventFileWriter) -> None:
        """One of its users has gone; the last one closes the file. Blocks on the disk."""
        with self._lock:
            uses = [(place, num) for place, (each, num) in self._open.items() if each is writer]
            if not uses:  # it is the parent's of this forked process
                return
            place, num_users = uses[0]
            if num_users > 1:
                self._open[place] = writer, num_users - 1
                return
            del self._open[place]
        writer.close()


_EVENT_FILES = EventFiles()
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_EVENT_FILES.forget)


def _event_files_in(directory: str) -> set[str]:
    """The names of this process's event files there; none of a directory that is not local."""
    if not os.path.isdir(directory):
        return set()
    names, process = os.listdir(directory), f".{os.getpid()}."
    return {each for each in names if "events.out.tfevents." in each and process in each}


def _serialized(message: Any) -> bytes:
    is_bytes = isinstance(message, bytes)
    data: bytes = message if is_bytes else message.SerializeToString()
    return data
