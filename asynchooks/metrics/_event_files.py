"""Event files for TensorBoard: one per directory and process, written by a thread of its own.

TensorBoard reads the event files of a directory one after the other, and no file again after the
next one: of two files that grow at the same time it drops points. What the events say is not known
here.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from typing import Any
from weakref import WeakSet

from .._engine.background import BackgroundThread
from .._errors import tensorflow_errors
from ._append import append_whole

logger = logging.getLogger("asynchooks")

MAX_BYTES = 64 << 20
"""Of events that wait for the disk in memory; more are dropped."""
_PREFIX = "events.out.tfevents."


def errors_of_writing() -> tuple[type[BaseException], ...]:
    """What a disk, or TensorFlow's file systems, raise: never a reason to end training."""
    errors = tensorflow_errors()
    return (OSError,) if errors is None else (OSError, errors.OpError)


def tensorflows_writer(directory: str) -> Any:
    """TensorFlow's cached writer of the directory, which its own hooks share; do not close it.

    Call it with a graph as the default one: TensorFlow writes no events where execution is eager.
    The writer may be cached under another spelling of the directory. One that its user has closed
    is opened again, into a new file. The cache's table is private: tested with TensorFlow 2.16,
    2.18 and 2.21.
    """
    cache, path = sys.modules["tensorflow"].compat.v1.summary.FileWriterCache, _canonical(directory)
    with cache._lock:
        known = [key for key in cache._cache if _canonical(key) == path]
    writer = cache.get(known[0] if known else directory)
    writer.reopen()  # does something only where it was closed
    return writer


def _canonical(directory: Any) -> str:
    """The same path for every spelling of a directory."""
    path = os.fsdecode(directory)
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def message_class(module: str, name: str) -> Any:
    """A message class: TensorFlow's where that is loaded, else TensorBoard's.

    The writers of TensorFlow, and those that a user gives, take no other ones.
    """
    # missing while another thread is importing it
    v1 = getattr(getattr(sys.modules.get("tensorflow"), "compat", None), "v1", None)
    found = getattr(v1, name, None)
    if found is None:
        found = getattr(importlib.import_module(f"tensorboard.compat.proto.{module}"), name)
    return found


def scalar_summary(tag: str, value: float) -> Any:
    """One scalar as a summary message."""
    summary = message_class("summary_pb2", "Summary")
    return summary(value=[summary.Value(tag=tag, simple_value=value)])


def session_start() -> Any:
    """The message that a session has begun."""
    session_log = message_class("event_pb2", "SessionLog")
    return session_log(status=session_log.START)


def serialized(message: Any) -> bytes:
    """The bytes of a message, or the bytes that it is already."""
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


class EventFile:
    """An event file, and the thread that makes and writes it; `Events.open` makes it.

    Any thread may call it. Only `flush` and `close` wait for the disk, so hooks may call the others
    on the event loop: what does not fit into the memory for it is dropped, which is logged once. An
    error of the disk is raised by the next call; the events that it met are lost.

    TensorBoard's own `RecordWriter` makes the records, in the thread that writes. Its
    `EventFileWriter` is not used: its queue of 10 events, and each of its flushes, hold up every
    caller for as long as the disk takes.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: _File | None = None  # made and written in the thread alone
        self._changed = threading.Condition()  # guards all that follows
        self._ahead: list[bytes] = []
        self._num_bytes = 0  # of those ahead, and of those that are being written
        self._num_asked = self._num_flushed = 0  # flushes
        self.num_added = 0
        """How many events were added so far; it only grows."""
        self._last_start = -1, 0  # (how many events were ahead of it, its step)
        self._failure: Exception | None = None  # not raised so far
        self._has_dropped = False
        self._process = os.getpid()
        self._thread = BackgroundThread("asynchooks-events", self._serve)
        self._thread.start()

    @property
    def name(self) -> str:
        """Of the file in the directory; empty before the first flush."""
        return "" if self._file is None else self._file.name

    @property
    def size(self) -> int:
        """Of the file, in bytes, up to the last event that was written."""
        return 0 if self._file is None else self._file.size

    def add_summary(self, summary: Any, global_step: int) -> None:
        self._add_message(global_step, "summary", summary)

    def add_session_log(self, session_log: Any, global_step: int) -> None:
        self._last_start = self.num_added, global_step
        self._add_message(global_step, "session_log", session_log)

    def hides_after(self, step: int, num_added: int) -> bool:
        """Whether events of later steps, of the first so many events, are hidden already."""
        num_ahead, start = self._last_start
        return num_ahead >= num_added and start <= step + 1

    def _add_message(self, step: int, field: str, message: Any) -> None:
        # the file format asks for wall time, which engines do not have
        event = message_class("event_pb2", "Event")(wall_time=time.time(), step=step)
        getattr(event, field).MergeFromString(serialized(message))
        self.add_event(event)

    def add_event(self, event: Any) -> None:
        """Add an event message as it is."""
        data = serialized(event)
        with self._changed:
            self._raise_failure()
            if self._thread.is_ending:
                raise OSError(f"the event file of {self._directory!r} is closed; open a new one")
            if self._num_bytes > MAX_BYTES:
                if not self._has_dropped:
                    self._has_dropped = True
                    logger.warning(
                        "%s does not take events as fast as they come: %d MB wait in memory, and "
                        "events are dropped until there is room; see whether that disk is stuck",
                        self._directory,
                        self._num_bytes >> 20,
                    )
                return
            self._ahead.append(data)
            self._num_bytes += len(data)
            self.num_added += 1
        self._thread.ring()

    def flush(self) -> None:
        """Block until the file is there, and all that was added is on the disk."""
        if os.getpid() != self._process:
            return  # the thread that writes it is of the parent process
        with self._changed:
            self._num_asked += 1
            number = self._num_asked
            self._thread.ring()
            self._changed.wait_for(lambda: self._num_flushed >= number)
            self._raise_failure()

    def close(self) -> None:
        """Write what was added, and end the thread. Blocks on the disk."""
        if os.getpid() == self._process:
            self._thread.end()
            self._thread.join()
            self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _serve(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._thread.pause()
            with self._changed:
                batch, self._ahead = self._ahead, []
                num_asked = self._num_asked
            failure: Exception | None = None
            try:
                self._write(batch, syncs=num_asked > self._num_flushed)
            except Exception as error:
                failure = error
            with self._changed:
                self._failure = failure or self._failure
                self._num_bytes -= sum(map(len, batch))
                # no task waits for a thread that ends
                self._num_flushed = sys.maxsize if is_last else num_asked
                self._changed.notify_all()
        if self._file is not None:
            self._file.close()

    def _write(self, batch: list[bytes], *, syncs: bool) -> None:
        if self._file is None:
            self._file = _new_file(self._directory)
        if batch:
            self._file.append(batch)
        if syncs:
            self._file.sync()


class _File:
    """A new event file, which only grows. FileExistsError: there is one of this name."""

    def __init__(self, directory: str, name: str) -> None:
        self.name, self.size = name, 0
        self._file = open(os.path.join(directory, name), "xb", buffering=0)  # noqa: SIM115
        event = message_class("event_pb2", "Event")(
            wall_time=time.time(), file_version="brain.Event:2"
        )
        event.source_metadata.writer = "asynchooks"
        try:
            self.append([serialized(event)])
        except BaseException:
            self.close()
            os.remove(os.path.join(directory, name))
            raise

    def append(self, events: Iterable[bytes]) -> None:
        """Write all of them behind what is there, or none."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = BytesIO()
        writer = RecordWriter(buffer)
        for each in events:
            writer.write(each)
        self.size = append_whole(self._file, buffer.getvalue(), self.size)

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _new_file(directory: str) -> _File:
    """A new event file in the directory, which is made.

    TensorBoard reads files in the order of their names, which begin with a second: this one has to
    be the last, also where processes begin and end within one second.
    """
    os.makedirs(directory, exist_ok=True)
    while True:
        last = max(map(_second_of, names_in(directory)), default=0)
        second = max(int(time.time()), last + 1)
        with suppress(FileExistsError):
            name = f"{_PREFIX}{second:010d}.{socket.gethostname()}.{os.getpid()}"
            return _File(directory, name)


def _second_of(name: str) -> int:
    second = name.partition(_PREFIX)[2].partition(".")[0]
    return int(second) if second.isdecimal() else 0


def names_in(directory: str) -> list[str]:
    """The names of the event files there, in the order in which TensorBoard reads them."""
    found = os.listdir(directory) if os.path.isdir(directory) else []
    return sorted(name for name in found if "tfevents" in name)


def events_in(directory: str, name: str, start: int = 0) -> Iterator[Any]:
    """The events of a file from an offset on, up to its end or its first record that is none.

    That is torn, or of another program: lengths in the file are not trusted.
    """
    path = os.path.join(directory, name)
    event, checksum = message_class("event_pb2", "Event"), _checksum_of()
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    end = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(start)
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack_from("<Q", head)
            start += 16 + length
            if struct.pack("<I", checksum(head[:8])) != head[8:] or start > end:
                return
            data = file.read(length)
            if len(data) < length or len(file.read(4)) < 4:
                return
            try:
                found = event.FromString(data)
            except decode_error:
                return
            yield found


def _checksum_of() -> Any:
    name = "tensorboard.compat.tensorflow_stub.pywrap_tensorflow"
    return importlib.import_module(name).masked_crc32c


class Events:
    """What one hook, or one sink, writes into a directory; it opens and closes it.

    TensorFlow's cached writer takes it where the session runs a graph, else the file that all of
    the directory in this process share.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.writer: Any = None
        """TensorFlow's writer, or an `EventFile`; None where it is not open."""
        self.has_begun = False
        """`begin` was called, so that no other writer is to write a start there."""
        self.is_dropped = False
        """Its session was dropped: it writes no more, and others close its file.

        To set it waits for nothing, and takes no lock."""
        self._shared: _Shared

    @property
    def file(self) -> EventFile | None:
        """The writer, unless it is TensorFlow's."""
        return self.writer if isinstance(self.writer, EventFile) else None

    @property
    def is_open(self) -> bool:
        return self.writer is not None and not self.is_dropped

    def open(self, in_graph_as: str = "") -> None:
        """Have a writer; another call does nothing. It waits for no disk.

        Args:
            in_graph_as: how TensorFlow knows the directory, in a session of the default graph.

        Raises:
            ImportError: TensorBoard is not installed (says what to install).
            ValueError: the directory is on no local disk, and no graph's.
        """
        if self.writer is not None:
            return
        if not in_graph_as:
            check(self.directory)
        with suppress(*errors_of_writing()):  # of files of others, who can no longer be told
            EVENT_FILES.close_unused()
        writer = tensorflows_writer(in_graph_as) if in_graph_as else None
        with EVENT_FILES.lock:
            self._shared = EVENT_FILES.of(self.directory)
            self._shared.users.add(self)
            if writer is None:
                self._shared.file = writer = self._shared.file or EventFile(self.directory)
            self.writer = writer

    def begin(self, hide_after: int | None, since: float = math.inf) -> None:
        """A session's events begin.

        The first of a directory has TensorBoard hide what earlier processes wrote of later steps.
        For the others that is done: it would hide what those before them have written since.

        Args:
            hide_after: the step; None: there is nothing to hide.
            since: when the session began to open, by `time.monotonic`: what others have hidden
                since then is done as well, though they may have left.
        """
        path, hidden_at = _canonical(self.directory), EVENT_FILES.hidden_at
        with EVENT_FILES.lock:  # no event is written between the question and the answer
            is_first = not self._shared.has_begun
            self.has_begun = True
            if is_first and hidden_at.get(path, -math.inf) < since:
                hidden_at[path] = time.monotonic()
                if hide_after is not None:
                    self.hide_after(hide_after)

    @property
    def others_have_begun(self) -> bool:
        """Whether no other writer needs to, and must, write the start of a session there."""
        with EVENT_FILES.lock:
            return self._shared.has_begun

    def hide_after(self, step: int) -> None:
        """Make TensorBoard hide all events of later steps that were written so far.

        Twice: to some of its readers the first start in a directory hides nothing.
        """
        for _ in range(2):
            self.writer.add_session_log(session_start(), step + 1)

    def close(self) -> None:
        """Flush what was written; the last one of a file closes it. Blocks on the disk."""
        writer, self.writer, self.has_begun = self.writer, None, False
        try:
            if writer is not None:
                writer.flush()
        finally:
            EVENT_FILES.close_unused()


class _Shared:
    """What the outputs of one directory have in common, until the last one has gone."""

    def __init__(self) -> None:
        self.users: WeakSet[Events] = WeakSet()
        self.file: EventFile | None = None

    @property
    def has_begun(self) -> bool:
        return any(each.has_begun and each.is_open for each in self.users)


class EventFiles:
    """The directories of this process that are written to.

    Hooks of several sessions, event loops and threads have nothing else in common, so there is one
    table in the process, as TensorFlow has its `FileWriterCache`. Unlike that, it closes a file
    when its last user has gone; later users, and forked processes, get a new one.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked process: the files, and the threads that write them, are the parent's."""
        self.lock = threading.Lock()  # guards the next two; never held while the disk is used
        self.directories: dict[str, _Shared] = {}
        self.hidden_at: dict[str, float] = {}  # when the first output of a session began

    def of(self, directory: str) -> _Shared:
        return self.directories.setdefault(_canonical(directory), _Shared())

    def close_unused(self) -> None:
        """Close the files of which no user is open any more. Blocks on the disk."""
        with self.lock:
            unused = [
                (path, each)
                for path, each in self.directories.items()
                if not any(user.is_open for user in each.users)
            ]
            for path, _ in unused:
                del self.directories[path]
        for _, each in unused:
            if each.file is not None:
                each.file.close()


def check(directory: str) -> None:
    """Raise ImportError, ValueError where no event file can be written; see `Events.open`."""
    if "://" in directory:
        raise ValueError(
            f"the directory of event files is {directory!r}; give one on a local disk, or a "
            "summary_writer of your own"
        )
    try:
        importlib.import_module("tensorboard.compat.proto.event_pb2"), _checksum_of()
    except ImportError as error:
        raise ImportError(
            f"writing events to {directory!r} needs TensorBoard: pip install "
            "'asynchooks[tensorboard]', or give a summary_writer of your own"
        ) from error


EVENT_FILES = EventFiles()
if sys.platform != "win32":
    os.register_at_fork(after_in_child=EVENT_FILES.forget)
