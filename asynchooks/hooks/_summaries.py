"""Event files for TensorBoard, by its own writer or TensorFlow's; one file per directory.

TensorBoard reads the event files of a directory one after the other, and no file again after the
next one: of two files that grow at the same time it drops points.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from .._engine.current import current_engine
from .._engine.threads import run_blocking
from .._hook import SessionRunHook, begin_graph
from .._running.hook_state import TimerState
from .._timer import timer_of

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
        self._directory = directory
        self.writer: Any = writer
        self._own: EventFileWriter | None = None
        self._serializes = False  # the writer is TensorFlow's, and messages are TensorBoard's

    def open(self) -> None:
        """In the hook's begin.

        In a TensorFlow graph the writer is TensorFlow's cached one, which TensorFlow's hooks use,
        too, and which must not be closed. Elsewhere it is TensorBoard's, which needs no TensorFlow,
        unless TensorFlow's cache has one of the directory. Hooks of one directory share it.
        ImportError: neither is installed (says what to install).
        """
        if self.writer is not None or not self._directory:
            return
        if begin_graph.get() is not None:
            self.writer = tensorflows_writer(self._directory)
        else:
            # relative names in the cache may belong to another working directory
            self.writer = _cached_by_tensorflow(self._directory, only_absolute=True)
            self._serializes = self.writer is not None
            if self.writer is None:
                self.writer = self._own = _EVENT_FILES.open(self._directory)

    def add_summary(self, summary: Any, step: int) -> None:
        """Write a summary of the step; there must be a writer."""
        self.writer.add_summary(_serialized(summary) if self._serializes else summary, step)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write one scalar of the step, where there is a writer."""
        if self.writer is not None:
            self.add_summary(scalar_summary(tag, value), step)

    async def finish(self) -> None:
        """At any end of the session; waits for the disk off the event loop."""
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


class TimedOutputHook(SessionRunHook):
    """Base of hooks that write to `_output` when `_timer` is due, by the named intervals."""

    needs_global_step = True

    def __init__(self, output_dir: str | None, writer: Any, **intervals: float | None) -> None:
        self._timer = timer_of(**intervals)
        self._output = Output(output_dir, writer)

    async def begin(self) -> None:
        self._output.open()

    def state_dict(self) -> dict[str, Any]:
        return TimerState(timer=self._timer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._timer.load_state_dict(state["timer"])

    async def end(self, session: Any) -> None:
        await self._finish()

    async def on_error(self, session: Any, exception: BaseException) -> None:
        await self._finish()

    async def _finish(self) -> None:
        await self._output.finish()


def tensorflows_writer(directory: str) -> Any:
    """TensorFlow's cached writer of the directory, which its own hooks share; do not close it.

    Call it with a graph as the default one: TensorFlow writes no events where execution is eager.
    A writer that its user has closed is opened again, into a new file.
    """
    writer = _cached_by_tensorflow(directory)
    if writer is None:
        writer = sys.modules["tensorflow"].compat.v1.summary.FileWriterCache.get(directory)
    return writer


def _cached_by_tensorflow(directory: str, *, only_absolute: bool = False) -> Any:
    """The writer of the directory, in any spelling, in TensorFlow's cache; None if there is none.

    The cache's table is private: tested with TensorFlow 2.16, 2.18 and 2.21.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return None
    cache, path = tensorflow.compat.v1.summary.FileWriterCache, _canonical(directory)
    with cache._lock:
        keys = [key for key in cache._cache if not only_absolute or _is_absolute(key)]
        writers = [cache._cache[key] for key in keys if _canonical(key) == path]
    if not writers:
        return None
    writers[0].reopen()  # only does something if it was closed
    return writers[0]


def _is_absolute(directory: Any) -> bool:
    path = os.fsdecode(directory)
    return "://" in path or os.path.isabs(path)


def _canonical(directory: Any) -> str:
    """The same path for every spelling of a directory."""
    path = os.fsdecode(directory)
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def scalar_summary(tag: str, value: float) -> Any:
    """One scalar as a summary message."""
    summary = _message("summary_pb2", "Summary")
    return summary(value=[summary.Value(tag=tag, simple_value=value)])


def session_start() -> Any:
    """The message that a session has begun."""
    session_log = _message("event_pb2", "SessionLog")
    return session_log(status=session_log.START)


def _message(module: str, name: str) -> Any:
    """A message class: TensorFlow's where that is loaded, else TensorBoard's."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None:
        return getattr(tensorflow.compat.v1, name)
    return getattr(importlib.import_module(f"tensorboard.compat.proto.{module}"), name)


class EventFileWriter:
    """TensorBoard's event file writer under the methods that hooks use; `EventFiles` makes it.

    Any thread may call it.
    """

    num_users = 0

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
        # A name ends with the second and a count, 9 before 10: a file may sort before an earlier
        # one of the same second, and would be read before it.
        while before and max(_event_files_in(directory) - before) < max(before):
            (name,) = _event_files_in(directory) - before
            self._writer.close()
            os.remove(os.path.join(directory, name))
            self._writer = event_file_writer.EventFileWriter(directory)

    def add_summary(self, summary: Any, global_step: int) -> None:
        self._add(global_step, "summary", summary)

    def add_session_log(self, session_log: Any, global_step: int) -> None:
        self._add(global_step, "session_log", session_log)

    def _add(self, step: int, field: str, message: Any) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event

        # the file format asks for wall time, which engines do not have
        event = Event(wall_time=time.time(), step=step)
        getattr(event, field).MergeFromString(_serialized(message))
        self._writer.add_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class EventFiles:
    """The open event files of this process, one for each directory.

    Hooks of several sessions, event loops and threads have nothing else in common, so there is one
    table in the process, as TensorFlow has its `FileWriterCache`. Unlike that, it closes a file
    when its last user has gone; later users, and forked processes, get a new one.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked process: the files, and the threads that write them, are the parent's."""
        self._lock = threading.Lock()  # guards the next one
        self._open: dict[str, EventFileWriter] = {}  # by path

    def open(self, directory: str) -> EventFileWriter:
        """The writer of the directory; each call needs one of `close`."""
        path = _canonical(directory)
        with self._lock:
            writer = self._open[path] = self._open.get(path) or EventFileWriter(directory)
            writer.num_users += 1
        return writer

    def close(self, writer: EventFileWriter) -> None:
        """One of its users has gone; the last one closes the file. Blocks on the disk."""
        with self._lock:
            paths = [path for path, each in self._open.items() if each is writer]
            if not paths:  # it belongs to the parent of this forked process
                return
            writer.num_users -= 1
            if writer.num_users:
                return
            del self._open[paths[0]]
        writer.close()


_EVENT_FILES = EventFiles()
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_EVENT_FILES.forget)


def _event_files_in(directory: str) -> set[str]:
    """The names of this process's event files; none where the directory is not local."""
    if not os.path.isdir(directory):
        return set()
    names, process = os.listdir(directory), f".{os.getpid()}."
    return {each for each in names if "events.out.tfevents." in each and process in each}


def _serialized(message: Any) -> bytes:
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data
