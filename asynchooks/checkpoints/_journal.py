"""Journal: records that are appended as they come, and are read again after a crash.

A journal is a directory, or a prefix of an object store, with segments: files with increasing
numbers that are only ever appended to. A segment begins with a head, which names the training that
it is of; then follow frames, one for each record. A frame that is torn, by a crash or a full disk,
ends its segment. Nothing here knows what the records hold.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from struct import Struct
from typing import NamedTuple

from .. import _check
from .._engine.background import BackgroundThread
from .._engine.base import Engine
from .._errors import CheckpointError
from ._files import failure, make_directories, open_file, sync_directory
from ._lease import Lease
from ._lock import DirectoryLock
from ._store import ObjectStore, object_store_of

logger = logging.getLogger("asynchooks")

_MAGIC = b"asynchooks journal 1\n"
_SIZE = Struct("<QI")
"""How a frame begins: bytes of name and value, and a checksum of all that follows."""
_FRAME = Struct("<QIIQqqIB")
"""The same, with numbers of the record."""
_CHECKED_FROM = _SIZE.size
_SEGMENT = re.compile(r"(\d{10})\.journal")
_FLUSH_SECS = 0.5
"""How long a record waits for others before it is flushed."""
_CLOSE_SECS = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Record(NamedTuple):
    """What a journal keeps, of the item at a place of the input."""

    place: int
    born: int
    """The version of the weights that it was made with, in batches since the first training."""
    version: int
    """The same, in steps."""
    item: int
    """A checksum of the item."""
    kind: int
    name: str
    value: bytes

    def frame(self) -> bytes:
        name = self.name.encode("utf-8", "surrogatepass")
        size, numbers = len(name) + len(self.value), (self.item, self.place, self.born)
        head = _FRAME.pack(size, 0, *numbers, self.version, len(name), self.kind)
        checked = b"".join((head[_CHECKED_FROM:], name, self.value))
        return _SIZE.pack(size, zlib.crc32(checked)) + checked


class _Entry(NamedTuple):
    """Where a frame is."""

    segment: int
    offset: int
    size: int


def _frames(content: bytes, offset: int) -> Iterator[tuple[int, int, Record]]:
    """(Offset, size, record) of each whole frame, up to the first that is torn."""
    view = memoryview(content)
    while len(content) - offset >= _FRAME.size:
        size, checksum, item, place, born, version, num_name, kind = _FRAME.unpack_from(
            content, offset
        )
        begin, end = offset + _FRAME.size, offset + _FRAME.size + size
        if end > len(content) or zlib.crc32(view[offset + _CHECKED_FROM : end]) != checksum:
            return
        name = str(view[begin : begin + num_name], "utf-8", "surrogatepass")
        value = bytes(view[begin + num_name : end])
        yield offset, end - offset, Record(place, born, version, item, kind, name, value)
        offset = end


class Journal:
    """The journal of one training: opened before the first record, and closed at the end.

    What is added is in the system's hands at once where the place is a directory, so that it
    outlives the process; each second it is flushed to the disk, or sent to the store.

    Args:
        place: a directory, made if it is missing, or an object store, as for checkpoints.
    """

    def __init__(self, place: str | os.PathLike[str] | ObjectStore) -> None:
        store = object_store_of(place)
        self._segments: _Segments = (
            _Files(os.path.abspath(_check.path("journal", place)))
            if store is None
            else _Objects(store)
        )
        self._lock = threading.Lock()  # guards the next three, and appending
        self._index: dict[int, list[_Entry]] = {}  # by place
        self._is_done: Callable[[int], bool] | None = None  # of a cut that is due
        self._is_dirty = False
        self._thread = BackgroundThread("asynchooks-journal", self._serve)
        self._is_open = False
        self._has_warned = False

    def __str__(self) -> str:
        return self._segments.name

    def open(self, training: str) -> list[Record]:
        """Read what is there of this training, oldest first; forget that of others. May block.

        Raises:
            CheckpointInUseError: another run uses it.
            CheckpointError: it cannot be read.
        """
        segments = self._segments
        segments.head = _MAGIC + training.encode()
        try:
            try:
                segments.open()
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._warn(error)
            records = self._read()
        except BaseException as error:
            segments.close()
            if isinstance(error, OSError):
                raise failure(str(self), "the journal cannot be opened", error) from error
            raise
        self._thread = BackgroundThread("asynchooks-journal", self._serve)
        self._thread.start()
        self._is_open = True
        return records

    def _read(self) -> list[Record]:
        records, others, segments = [], [], self._segments
        self._index.clear()
        numbers = segments.numbers()
        segments.last = max(segments.last, *numbers, 0)
        for number in numbers:
            content = segments.read(number)
            end = len(segments.head)
            if not content.startswith(segments.head):
                if segments.head.startswith(content):  # torn before its first record
                    segments.delete(number)
                elif content.startswith(_MAGIC):
                    others.append(number)
                continue
            for offset, size, record in _frames(content, end):
                records.append(record)
                entry = _Entry(number, offset, size)
                self._index.setdefault(record.place, []).append(entry)
                end = offset + size
            if end < len(content):
                logger.info(
                    "%s: the last %d bytes of segment %d are torn, and left out",
                    self,
                    len(content) - end,
                    number,
                )
        if others:
            logger.warning("%s held the journal of another training, which is removed", self)
        for number in others:
            segments.delete(number)
        return records

    def add(self, record: Record) -> None:
        """Append a record; a failure is logged, once."""
        if not self._is_open:
            return  # training has ended
        frame = record.frame()
        with self._lock:
            try:
                entry = self._segments.append(frame)
            except OSError as error:
                self._warn(error)
                return
            self._index.setdefault(record.place, []).append(entry)
            was_dirty, self._is_dirty = self._is_dirty, True
        if not was_dirty:
            self._thread.ring()

    def cut(self, is_done: Callable[[int], bool]) -> None:
        """Forget the records of places of which this says so; soon, in a thread."""
        if self._is_open:
            with self._lock:
                self._is_done = is_done
            self._thread.ring()

    async def close(self, engine: Engine) -> None:
        """Flush it, and let others use it."""
        thread, was_open, self._is_open = self._thread, self._is_open, False
        if not was_open:
            return
        thread.end()
        if engine.is_virtual:  # whose time does not wait for a thread
            has_ended = thread.join(_CLOSE_SECS)
        else:
            has_ended = await thread.wait_for_end(engine, engine.now() + _CLOSE_SECS)
        if not has_ended:
            logger.error("%s is not flushed within %g s: it is left alone", self, _CLOSE_SECS)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The journal %s cannot be written: %s. Training goes on; after a crash, results "
                "that it lacks are made again",
                self,
                error,
            )

    # In the thread

    def _serve(self) -> None:
        thread, is_ending = self._thread, False
        while not is_ending:
            is_ending = thread.pause() or (self._is_done is None and thread.pause(_FLUSH_SECS))
            self._try(self._work)
        self._try(self._segments.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, CheckpointError) as error:
            self._warn(error)

    def _work(self) -> None:
        """Flush, and cut if that is due: what is left goes to a segment of its own."""
        segments, live = self._segments, {}
        with self._lock:
            self._is_dirty = False
            is_done, self._is_done = self._is_done, None
            if is_done is not None:
                live = {place: each for place, each in self._index.items() if not is_done(place)}
                self._index = {place: list(each) for place, each in live.items()}
                segments.leave()
                number = segments.next_number()
            flush = segments.unflushed()
        flush()
        if is_done is None:
            return
        old = [each for each in segments.numbers() if each < number]
        entries = sorted((each, place) for place, its in live.items() for each in its)
        moved, content, source, offset = [], [segments.head], (-1, b""), len(segments.head)
        for each, place in entries:
            if each.segment != source[0]:
                source = each.segment, segments.read(each.segment)
            frame = source[1][each.offset : each.offset + each.size]
            if len(frame) < each.size:
                continue  # it could not be written
            content.append(frame)
            moved.append((place, each, _Entry(number, offset, each.size)))
            offset += each.size
        if moved:
            segments.put(number, b"".join(content))
        with self._lock:
            for place, was, now in moved:
                its = self._index.get(place, [])
                self._index[place] = [now if each == was else each for each in its]
        for was_number in old:
            segments.delete(was_number)


class _Segments(ABC):
    """Where the segments of a journal are."""

    name: str
    head = b""
    """What each segment begins with."""
    last = 0
    """The highest number."""

    def next_number(self) -> int:
        self.last += 1
        return self.last

    def numbers(self) -> list[int]:
        """Of all segments there are, in order."""
        found = [_SEGMENT.fullmatch(each) for each in self._names()]
        return sorted(int(each[1]) for each in found if each is not None)

    @abstractmethod
    def open(self) -> None:
        """Keep it to this run."""

    @abstractmethod
    def close(self) -> None:
        """Let others have it."""

    @abstractmethod
    def _names(self) -> list[str]: ...

    @abstractmethod
    def append(self, frame: bytes) -> _Entry:
        """To the present segment, or a new one; behind the last whole frame."""

    @abstractmethod
    def leave(self) -> None:
        """The next frame begins a new segment."""

    @abstractmethod
    def unflushed(self) -> Callable[[], None]:
        """What has all that was appended until now outlive the machine."""

    @abstractmethod
    def put(self, number: int, content: bytes) -> None:
        """Write a segment, whole or not at all, which outlives the machine."""

    @abstractmethod
    def read(self, number: int) -> bytes: ...

    @abstractmethod
    def delete(self, number: int) -> None: ...


class _Files(_Segments):
    """Files of a directory."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._directory_lock: DirectoryLock | None = None
        self._present: int | None = None  # a descriptor
        self._size = 0
        self._left: list[int] = []  # descriptors that are to be synced and closed

    def open(self) -> None:
        make_directories(self.name)
        self._directory_lock = DirectoryLock(self.name)
        self._directory_lock.take()

    def close(self) -> None:
        try:
            self.leave()
            self.unflushed()()
        finally:
            if self._directory_lock is not None:
                self._directory_lock.release()

    def _names(self) -> list[str]:
        return os.listdir(self.name) if os.path.isdir(self.name) else []  # a full disk has none

    def _path(self, number: int) -> str:
        return os.path.join(self.name, f"{number:010}.journal")

    def append(self, frame: bytes) -> _Entry:
        if self._present is None:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
            self._present = os.open(self._path(self.next_number()), flags, 0o666)
            self._size = 0
        content = memoryview(frame if self._size else self.head + frame)
        entry = _Entry(self.last, self._size + len(content) - len(frame), len(frame))
        os.lseek(self._present, self._size, os.SEEK_SET)  # over one that was written in part
        while content:
            content = content[os.write(self._present, content) :]
        self._size = entry.offset + entry.size
        return entry

    def leave(self) -> None:
        if self._present is not None:
            self._left.append(self._present)
            self._present = None

    def unflushed(self) -> Callable[[], None]:
        present, left, self._left = self._present, self._left, []

        def flush() -> None:
            try:
                for each in (*left, *([] if present is None else [present])):
                    os.fsync(each)
                sync_directory(self.name)
            finally:
                for each in left:
                    os.close(each)

        return flush

    def put(self, number: int, content: bytes) -> None:
        unfinished = os.path.join(self.name, "unfinished")  # of a crash, or on a full disk
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self._path(number))
        sync_directory(self.name)

    def read(self, number: int) -> bytes:
        with open_file(self._path(number)) as file:
            return file.readall()

    def delete(self, number: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(number))


class _Objects(_Segments):
    """Objects of a store: one for all that was appended between two flushes."""

    def __init__(self, store: ObjectStore) -> None:
        self.name = store.name
        self._store = store
        self._lease = Lease(store)
        self._number = 0
        self._frames: list[bytes] = []
        self._size = 0

    def open(self) -> None:
        self._lease.take()

    def close(self) -> None:
        self._lease.release()

    def _names(self) -> list[str]:
        return [each.key for each in self._store.list()]

    @staticmethod
    def _key(number: int) -> str:
        return f"{number:010}.journal"

    def append(self, frame: bytes) -> _Entry:
        if not self._frames:
            self._number, self._frames = self.next_number(), [self.head]
            self._size = len(self.head)
        self._frames.append(frame)
        self._size += len(frame)
        return _Entry(self._number, self._size - len(frame), len(frame))

    def leave(self) -> None:
        """Each flush leaves it."""

    def unflushed(self) -> Callable[[], None]:
        number, frames, self._frames = self._number, self._frames, []

        def flush() -> None:
            if frames:
                self.put(number, b"".join(frames))

        return flush

    def put(self, number: int, content: bytes) -> None:
        if not self._store.create(self._key(number), content):
            raise CheckpointError(f"{self.name}: another run has begun to write this journal")

    def read(self, number: int) -> bytes:
        return self._store.get(self._key(number)) or b""

    def delete(self, number: int) -> None:
        self._store.delete(self._key(number))
