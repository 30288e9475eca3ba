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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from typing import Any, Protocol
from weakref import ref

from .._errors import tensorflow_errors
from ._append import append_whole

logger = logging.getLogger("asynchooks")

MAX_BYTES = 64 << 20
"""Of events that wait for the disk in memory; more are dropped."""
_CROWDED_BYTES = 1 << 20
_REMOTE_FLUSH_SECS = 120.0
"""Between two uploads of a remote file, as in TensorBoard's own writer."""


def errors_of_writing() -> tuple[type[BaseException], ...]:
    """What a disk, or TensorFlow's file systems, raise: never a reason to end training."""
    errors = tensorflow_errors()
    return (OSError,) if errors is None else (OSError, errors.OpError)


def tensorflows_writer(directory: str) -> Any:
    """TensorFlow's cached writer of the directory, which its own hooks share; do not close it.

    Call it with a graph as the default one: TensorFlow writes no events where execution is eager.
    A writer that its user has closed is opened again, into a new file.
    """
    writer = cached_by_tensorflow(directory)
    if writer is None:
        writer = sys.modules["tensorflow"].compat.v1.summary.FileWriterCache.get(directory)
    return writer


def cached_by_tensorflow(directory: str, *, only_absolute: bool = False) -> Any:
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


def message_class(module: str, name: str) -> Any:
    """A message class: TensorFlow's where that is loaded, else TensorBoard's."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None:
        return getattr(tensorflow.compat.v1, name)
    return tensorboards(module, name)


def tensorboards(module: str, name: str) -> Any:
    """A message class of TensorBoard's, whose records our files have."""
    return getattr(importlib.import_module(f"tensorboard.compat.proto.{module}"), name)


def scalar_summary(tag: str, value: float) -> Any:
    """One scalar as a summary message."""
    summary = message_class("summary_pb2", "Summary")
    return summary(value=[summary.Value(tag=tag, simple_value=value)])


def session_start() -> Any:
    """The message that a session has begun."""
    session_log = message_class("event_pb2", "SessionLog")
    return session_log(status=session_log.START)


def hide_after(writer: Any, start: Any, step: int) -> None:
    """Make TensorBoard hide all events of later steps that were written so far.

    Twice: to some of its readers the first start in a directory hides nothing.
    """
    for _ in range(2):
        writer.add_session_log(start, step + 1)


def serialized(message: Any) -> bytes:
    """The bytes of a message, or the bytes that it is already."""
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


class EventFileWriter:
    """Writes one event file under the methods that hooks use; `EventFiles` makes it.

    Any thread may call it. Its `add_` methods never wait for the disk, so that hooks may call them
    on the event loop: what does not fit into the memory for it is dropped, which is logged once.
    An error of the disk is raised by the next call; the events that it met are lost.

    TensorBoard's own `RecordWriter` makes the records, in the thread that writes. Its
    `EventFileWriter` is not used: its queue of 10 events, and each of its flushes, hold up every
    caller for as long as the disk takes.
    """

    num_users = 0

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._opening = threading.Lock()  # guards the next one
        self._file: _File | None = None
        self._changed = threading.Condition()  # guards all that follows
        self._ahead: list[bytes] = []
        self._num_bytes = 0  # of those ahead, and of those that are being written
        self._num_added = self._num_written = 0  # events; both only grow
        self._last_start = -1, 0  # (how many events were ahead of it, its step)
        self._failure: Exception | None = None  # not raised so far
        self._is_closing = self._has_dropped = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="asynchooks-events", daemon=True)

    @property
    def name(self) -> str:
        """Of the file in the directory; empty before `open`."""
        return "" if self._file is None else self._file.name

    @property
    def size(self) -> int:
        """Of the file, in bytes, up to the last event that was written."""
        return 0 if self._file is None else self._file.size

    def open(self) -> None:
        """Make the file and its directory; each user calls it. Blocks on the disk."""
        with self._opening:
            if self._file is not None:
                return
            file = _new_file(self._directory)
            event = tensorboards("event_pb2", "Event")(
                wall_time=time.time(), file_version="brain.Event:2"
            )
            event.source_metadata.writer = "asynchooks"
            try:
                file.append([serialized(event)])
            except BaseException:
                file.close()
                raise
            self._file = file
            self._thread.start()

    def add_summary(self, summary: Any, global_step: int) -> None:
        self._add_message(global_step, "summary", summary)

    def add_session_log(self, session_log: Any, global_step: int) -> None:
        self._last_start = self._num_added, global_step
        self._add_message(global_step, "session_log", session_log)

    @property
    def num_added(self) -> int:
        """How many events were added so far; it only grows."""
        return self._num_added

    def hides_after(self, step: int, num_added: int) -> bool:
        """Whether events of later steps, of the first so many events, are hidden already."""
        num_ahead, start = self._last_start
        return num_ahead >= num_added and start <= step + 1

    def _add_message(self, step: int, field: str, message: Any) -> None:
        # the file format asks for wall time, which engines do not have
        event = tensorboards("event_pb2", "Event")(wall_time=time.time(), step=step)
        getattr(event, field).MergeFromString(serialized(message))
        self.add_event(event)

    def add_event(self, event: Any) -> None:
        """Add an event message as it is."""
        data = serialized(event)
        with self._changed:
            self._raise_failure()
            if self._is_closing:
                raise OSError(f"the event file of {self._directory!r} is closed; open a new one")
            if self._num_bytes > MAX_BYTES:
                if not self._has_dropped:
                    self._has_dropped = True
                    logger.warning(
                        "%s does not take events as fast as they come: %d MB wait in memory, and "
                        "events are dropped until there is room; see whether that disk is stuck",
                        self._directory, self._num_bytes >> 20,
                    )  # fmt: skip
                return
            self._ahead.append(data)
            self._num_bytes += len(data)
            self._num_added += 1
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Block until only a few events wait for the disk: for a thread that may be stuck."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes <= _CROWDED_BYTES)

    def flush(self) -> None:
        """Block until all that was added is on the disk."""
        if os.getpid() != self._process or self._file is None:
            return  # the file, and the thread that writes it, are of the parent process
        with self._changed:
            num_added = self._num_added
            self._changed.wait_for(lambda: self._num_written >= num_added)
            self._raise_failure()
        self._file.sync()

    def close(self) -> None:
        """Write what was added, and end the thread. Blocks on the disk."""
        if os.getpid() != self._process or self._file is None:
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._file.close()
        with self._changed:
            self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        assert self._file is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ahead or self._is_closing)
                batch, self._ahead = self._ahead, []
            if not batch:
                return
            failure: Exception | None = None
            try:
                self._file.append(batch)
            except Exception as error:
                failure = error
            with self._changed:
                self._failure = failure or self._failure
                self._num_bytes -= sum(map(len, batch))
                self._num_written += len(batch)
                self._changed.notify_all()


class _File:
    """A new event file, which only grows.

    Args:
        directory: that is there. Of TensorFlow's or TensorBoard's file systems, as "gs://...", it
            is written as seldom as TensorBoard's own writer does: each time may be an upload.
        name: FileExistsError: there is such a file.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.name, self.size = name, 0
        self._synced_at = -math.inf
        self._is_remote = "://" in directory
        self._file: Any
        if self._is_remote:
            self._file = _remote().GFile(_path(directory, name), "wb")
        else:
            self._file = open(_path(directory, name), "xb", buffering=0)  # noqa: SIM115

    def append(self, events: Iterable[bytes]) -> None:
        """Write all of them behind what is there, or none."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = BytesIO()
        writer = RecordWriter(buffer)
        for each in events:
            writer.write(each)
        if not self._is_remote:
            self.size = append_whole(self._file, buffer.getvalue(), self.size)
            return
        self._file.write(buffer.getvalue())
        self.size += buffer.tell()
        if time.monotonic() - self._synced_at >= _REMOTE_FLUSH_SECS:
            self.sync()

    def sync(self) -> None:
        if self._is_remote:
            self._file.flush()
            self._synced_at = time.monotonic()
        else:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _remote() -> Any:
    """TensorFlow's file systems or, where it is not installed, those of TensorBoard."""
    from tensorboard.compat import tf

    return tf.io.gfile


def _path(directory: str, name: str) -> str:
    return (
        f"{directory.rstrip('/')}/{name}" if "://" in directory else os.path.join(directory, name)
    )


def _new_file(directory: str) -> _File:
    """A new event file in the directory, which is made.

    TensorBoard reads files in the order of their names, which begin with a second: this one has to
    be the last, also where processes begin and end within one second.
    """
    if "://" in directory:
        _remote().makedirs(directory)
    else:
        os.makedirs(directory, exist_ok=True)
    while True:
        last = max(map(_second_of, names_in(directory)), default=0)
        second = max(int(time.time()), last + 1)
        with suppress(FileExistsError):
            name = f"{_PREFIX}{second:010d}.{socket.gethostname()}.{os.getpid()}"
            return _File(directory, name)


_PREFIX = "events.out.tfevents."


def _second_of(name: str) -> int:
    second = name.partition(_PREFIX)[2].partition(".")[0]
    return int(second) if second.isdecimal() else 0


def names_in(directory: str) -> list[str]:
    """The names of the event files there, in the order in which TensorBoard reads them."""
    if "://" in directory:
        found = _remote().listdir(directory) if _remote().isdir(directory) else []
    else:
        found = os.listdir(directory) if os.path.isdir(directory) else []
    return sorted(name for name in found if "tfevents" in name)


def events_in(directory: str, name: str, start: int = 0) -> Iterator[Any]:
    """The events of a file from an offset on, up to its end or its first record that is none.

    That is torn, or of another program: lengths in the file are not trusted.
    """
    path = _path(directory, name)
    file: Any
    if "://" in directory:
        file, end = _remote().GFile(path, "rb"), _remote().stat(path).length
    else:
        file, end = open(path, "rb"), os.path.getsize(path)  # noqa: SIM115 - closed below
    event, checksum = tensorboards("event_pb2", "Event"), _checksum_of()
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    with file:
        if start:  # TensorBoard's own remote files have no other place than the next one
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


class Owner(Protocol):
    """The output of a hook, or a sink."""

    is_dropped: bool
    """Whether its session was dropped without being closed, so that it writes no more."""


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
        self._lock = threading.Lock()  # guards the next ones; never held while the disk is used
        self._open: dict[str, EventFileWriter] = {}  # by path
        self._dropped: deque[EventFileWriter] = deque()  # by users of sessions that were dropped
        self._begun: dict[str, list[ref[Owner]]] = {}  # whose events have begun, by path
        self._tags: dict[tuple[str, str], ref[Owner]] = {}  # who writes it, by path and tag
        self._claimed: dict[str, set[str]] = {}  # tags, by path, until all have left
        self._hidden_at: dict[str, float] = {}  # by path: when the first of a session began

    def open(self, directory: str) -> EventFileWriter:
        """The writer of the directory; each call needs one of `close`. Blocks on the disk.

        ImportError: TensorBoard is not installed (says what to install).
        """
        check_installed(directory)
        path = _canonical(directory)
        self._close_dropped()
        with self._lock:
            writer = self._open[path] = self._open.get(path) or EventFileWriter(directory)
            writer.num_users += 1
        try:
            writer.open()
        except BaseException:
            self.close(writer)
            raise
        return writer

    def close(self, writer: EventFileWriter) -> None:
        """One of its users has gone; the last one closes the file. Blocks on the disk."""
        self._close_dropped()
        self._close(writer)

    def drop(self, writer: EventFileWriter) -> None:
        """One of its users has gone, which may not wait, nor take a lock: others close it."""
        self._dropped.append(writer)

    def _close_dropped(self) -> None:
        while self._dropped:
            # another thread may take it; of an error of the disk nobody is left to be told
            with suppress(IndexError, OSError):
                self._close(self._dropped.popleft())

    def _close(self, writer: EventFileWriter) -> None:
        with self._lock:
            paths = [path for path, each in self._open.items() if each is writer]
            if not paths:  # it belongs to the parent of this forked process
                return
            writer.num_users -= 1
            if writer.num_users:
                return
            del self._open[paths[0]]
        writer.close()

    def begin(
        self, directory: str, owner: Owner, hide: Callable[[], None], since: float = math.inf
    ) -> None:
        """Begin the events of a session's output there; `leave` ends them.

        The first one has TensorBoard `hide` what earlier processes wrote of later steps. For the
        others that is done: it would hide what those before them have written since.

        Args:
            since: when the session began to open, by `time.monotonic`: what others have hidden
                since then is done as well, though they may have left.
        """
        path = _canonical(directory)
        with self._lock:  # nobody writes an event between the question and the answer
            others = self._that_have_begun(path)
            self._begun[path] = [*map(ref, others), ref(owner)]
            if not others and self._hidden_at.get(path, -math.inf) < since:
                self._hidden_at[path] = time.monotonic()
                hide()

    def leave(self, directory: str, owner: Owner) -> None:
        """One whose events began there has ended them."""
        path = _canonical(directory)
        with self._lock:
            others = [each for each in self._that_have_begun(path) if each is not owner]
            self._begun[path] = [*map(ref, others)]
            if not others:
                self._claimed.pop(path, None)

    def _that_have_begun(self, path: str) -> list[Owner]:
        owners = [each() for each in self._begun.get(path, ())]
        return [each for each in owners if each is not None and not each.is_dropped]

    def has_begun(self, directory: str) -> bool:
        """Whether others need not, and must not, write the start of a session there."""
        with self._lock:
            return bool(self._that_have_begun(_canonical(directory)))

    def claim(self, directory: str, tags: Iterable[str], owner: Owner) -> None:
        """Have these tags for one output alone, until `release`.

        RuntimeError: another one, which is open, writes one of them there.
        """
        path, tags = _canonical(directory), list(tags)
        with self._lock:
            self._claimed.setdefault(path, set()).update(tags)
            for tag in tags:
                found = self._tags.get((path, tag))
                other = None if found is None else found()
                if not (other is None or other is owner or other.is_dropped):
                    raise RuntimeError(
                        f"two hooks write {tag!r} into the event files of {directory!r}: their "
                        "values would mix. Give one of them another name or another directory; of "
                        "workers that share a model, give the directory to the hook of one"
                    )
                self._tags[path, tag] = ref(owner)

    def claimed(self, directory: str, tags: Iterable[str]) -> bool:
        """Whether a hook has had one of the tags for itself there, since events began there."""
        with self._lock:
            return not self._claimed.get(_canonical(directory), set()).isdisjoint(tags)

    def release(self, owner: Owner) -> None:
        """The tags of this one are free again."""
        with self._lock:
            for key in [key for key, found in self._tags.items() if found() in (owner, None)]:
                del self._tags[key]


def check_installed(directory: str) -> None:
    """ImportError, which says what to install, where TensorBoard is missing."""
    try:
        tensorboards("event_pb2", "Event"), _checksum_of()
    except ImportError as error:
        raise ImportError(
            f"writing events to {directory!r} needs TensorBoard: pip install "
            "'asynchooks[tensorboard]', or give a summary_writer of your own"
        ) from error


EVENT_FILES = EventFiles()
if sys.platform != "win32":
    os.register_at_fork(after_in_child=EVENT_FILES.forget)
