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
from collections.abc import Callable, Iterable, Iterator
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
_FIELDS = Struct("<IQqqI")
"""What follows before the name: numbers of the record, and bytes of the name."""
_SEGMENT = re.compile(r"(\d{10})\.journal")
_FLUSH_SECS = 0.5
"""How long a record waits for others before it is flushed."""
_CLOSE_SECS = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Record(NamedTuple):
    """What a journal keeps, of the item at a place of the input."""

    item: int
    """A checksum of the item."""
    place: int
    born: int
    """The version of the weights that it was made with, in batches since the first training."""
    version: int
    """The same, in steps."""
    name: str
    value: bytes

    def frame(self) -> bytes:
        name = self.name.encode("utf-8", "surrogatepass")
        head = _FIELDS.pack(self.item, self.place, self.born, self.version, len(name)) + name
        checksum = zlib.crc32(self.value, zlib.crc32(head))
        return b"".join((_SIZE.pack(len(name) + len(self.value), checksum), head, self.value))


def _frames(content: bytes, head: bytes) -> Iterator[tuple[bytes, Record]]:
    """Each frame behind the head, up to the first that is torn, with its record."""
    begin, view = len(head), memoryview(content)
    fields = _SIZE.size
    while len(content) - begin >= fields + _FIELDS.size:
        size, checksum = _SIZE.unpack_from(content, begin)
        item, place, born, version, num_name = _FIELDS.unpack_from(content, begin + fields)
        name = begin + fields + _FIELDS.size
        value, end = name + num_name, name + size
        if end > len(content) or zlib.crc32(view[begin + fields : end]) != checksum:
            break
        text = str(view[name:value], "utf-8", "surrogatepass")
        record = Record(item, place, born, version, text, bytes(view[value:end]))
        yield content[begin:end], record
        begin = end
    if begin < len(content):
        logger.info("The last %d bytes of a journal are torn, and left out", len(content) - begin)


class Journal:
    """The journal of one training: opened before the first record, and closed at the end.

    What is added is in the system's hands at once where the place is a directory, so that it
    outlives the process; each second it is flushed to the disk, or sent to the store.

    Args:
        place: a directory, made if it is missing, or an object store, as for checkpoints.
    """

    def __init__(self, place: str | os.PathLike[str] | ObjectStore) -> None:
        store = object_store_of(place)
        self._segments = _Files(_check.path("journal", place)) if store is None else _Objects(store)
        self._lock = threading.Lock()  # guards the next two, and appending
        self._is_done: Callable[[int], bool] | None = None  # of a cut that is due
        self._is_dirty = False
        self._thread = BackgroundThread("asynchooks-journal", self._serve)
        self.is_open = self._has_warned = False

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
        self.is_open = True
        return records

    def _read(self) -> list[Record]:
        records, others, segments = [], [], self._segments
        for number in segments.numbers():
            segments.last, content = number, segments.read(number)
            if content.startswith(segments.head):
                records += [record for _, record in _frames(content, segments.head)]
            elif segments.head.startswith(content):  # torn before its first record
                segments.delete(number)
            elif content.startswith(_MAGIC):
                others.append(number)
        if others:
            logger.warning("%s held the journal of another training, which is removed", self)
        for number in others:
            segments.delete(number)
        return records

    def add(self, record: Record) -> None:
        """Append a record; a failure is logged, once."""
        if not self.is_open:
            return  # training has ended
        frame = record.frame()
        with self._lock:
            try:
                self._segments.append(frame)
            except OSError as error:
                self._warn(error)
                return
            was_dirty, self._is_dirty = self._is_dirty, True
        if not was_dirty:
            self._thread.ring()

    def cut(self, is_done: Callable[[int], bool]) -> None:
        """Forget the records of places of which this says so; soon, in a thread."""
        if self.is_open:
            with self._lock:
                self._is_done = is_done
            self._thread.ring()

    async def close(self, engine: Engine) -> None:
        """Flush it, and let others use it."""
        thread, self.is_open = self._thread, False
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
        segments = self._segments
        with self._lock:
            self._is_dirty = False
            is_done, self._is_done = self._is_done, None
            if is_done is not None:
                segments.leave()
            flush = segments.unflushed()
            if is_done is not None:
                segments.last += 1
            number = segments.last
        flush()
        if is_done is None:
            return
        left, old = [segments.head], [each for each in segments.numbers() if each < number]
        for each in old:
            frames = _frames(segments.read(each), segments.head)
            left += [frame for frame, record in frames if not is_done(record.place)]
        if len(left) > 1:
            segments.put(number, b"".join(left))
        for each in old:
            segments.delete(each)


class _Files:
    """The segments in a directory."""

    head = b""
    """What each segment begins with."""
    last = 0
    """The highest number."""

    def __init__(self, path: str) -> None:
        self.name = os.path.abspath(path)
        self._held: DirectoryLock | None = None
        self._present: int | None = None  # a descriptor
        self._size = 0  # of its whole frames
        self._left: list[int] = []  # descriptors that are to be synced and closed

    def open(self) -> None:
        """Keep it to this run."""
        make_directories(self.name)
        self._held = DirectoryLock(self.name)
        self._held.take()

    def close(self) -> None:
        """Let others have it."""
        try:
            self.leave()
            self.unflushed()()
        finally:
            if self._held is not None:
                self._held.release()

    def numbers(self) -> list[int]:
        """Of all segments there are, in order."""
        has_place = os.path.isdir(self.name)  # else the disk was full
        return _numbers(os.listdir(self.name) if has_place else ())

    def append(self, frame: bytes) -> None:
        """To the present segment, or a new one; behind the last whole frame."""
        if self._present is None:
            self.last += 1
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
            self._present = os.open(self._path(self.last), flags, 0o666)
            self._size = 0
        content = memoryview(frame if self._size else self.head + frame)
        end = self._size + len(content)
        os.lseek(self._present, self._size, os.SEEK_SET)  # over one that was written in part
        while content:
            content = content[os.write(self._present, content) :]
        self._size = end

    def leave(self) -> None:
        """The next frame begins a new segment."""
        if self._present is not None:
            self._left.append(self._present)
            self._present = None

    def unflushed(self) -> Callable[[], None]:
        """What has all that was appended until now outlive the machine."""
        present, left, self._left = self._present, self._left, []

        def flush() -> None:
            try:
                for each in left if present is None else (*left, present):
                    os.fsync(each)
                sync_directory(self.name)
            finally:
                for each in left:
                    os.close(each)

        return flush

    def put(self, number: int, content: bytes) -> None:
        """Write a segment, whole or not at all, which outlives the machine."""
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
        os.unlink(self._path(number))

    def _path(self, number: int) -> str:
        return os.path.join(self.name, _key(number))


class _Objects(_Files):
    """The segments as objects of a store: one for all that was appended between two flushes."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__("")
        self.name, self._store, self._lease = store.name, store, Lease(store)
        self._frames: list[bytes] = []

    def open(self) -> None:
        self._lease.take()

    def close(self) -> None:
        self._lease.release()

    def numbers(self) -> list[int]:
        return _numbers(each.key for each in self._store.list())

    def append(self, frame: bytes) -> None:
        self._frames.append(frame)

    def unflushed(self) -> Callable[[], None]:
        frames, self._frames = self._frames, []
        self.last += bool(frames)
        number = self.last

        def flush() -> None:
            if frames:
                self.put(number, b"".join((self.head, *frames)))

        return flush

    def put(self, number: int, content: bytes) -> None:
        if not self._store.create(_key(number), content):
            raise CheckpointError(f"{self.name}: another run has begun to write this journal")

    def read(self, number: int) -> bytes:
        return self._store.get(_key(number)) or b""

    def delete(self, number: int) -> None:
        self._store.delete(_key(number))


def _numbers(names: Iterable[str]) -> list[int]:
    found = map(_SEGMENT.fullmatch, names)
    return sorted(int(each[1]) for each in found if each is not None)


def _key(number: int) -> str:
    return f"{number:010}.journal"
