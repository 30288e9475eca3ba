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
import pickle
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import FileIO
from struct import Struct
from typing import NamedTuple

from .. import _check
from .._engine.background import BackgroundThread
from .._engine.base import Engine
from .._engine.threads import run_blocking
from .._errors import CheckpointError
from ._files import failure, make_directories, open_file, sync_directory
from ._lease import Lease
from ._lock import DirectoryLock
from ._store import ObjectStore, object_store_of

logger = logging.getLogger("asynchooks")

_MAGIC = b"asynchooks journal 2\n"
_HEAD = Struct("<QI")
"""How a frame begins: bytes of its record, and their checksum."""
_SEGMENT = re.compile(r"(\d{10})\.journal")
_FLUSH_SECS = 0.5
"""How long a record waits for others before it is flushed."""
_FLUSH_EVERY = 16
"""Segments that are read or deleted by a cut before it flushes what came meanwhile."""
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
        content = pickle.dumps(tuple(self), 5)
        return _HEAD.pack(len(content), zlib.crc32(content)) + content


def _records(content: bytes, begin: int) -> Iterator[Record]:
    """The record of each frame from there on, up to the first that is torn."""
    while begin < len(content):
        here = begin + _HEAD.size
        size, checksum = _HEAD.unpack_from(content.ljust(here), begin)
        begin = here + size
        is_whole = 0 < size <= len(content) - here  # 0: what a power cut has left
        if not is_whole or zlib.crc32(content[here:begin]) != checksum:
            logger.info("The end of a segment of a journal is torn, and left out")
            break
        yield Record(*pickle.loads(content[here:begin]))


class Journal:
    """The journal of one training: opened before the first record, and closed at the end.

    What is added is in the system's hands at once where the place is a directory, so that it
    outlives the process; each half second it is flushed to the disk, or sent to the store.

    Args:
        place: a directory, made if it is missing, or an object store, as for checkpoints.
    """

    def __init__(self, place: str | os.PathLike[str] | ObjectStore) -> None:
        store = object_store_of(place)
        self._segments = _Files(_check.path("journal", place)) if store is None else _Objects(store)
        self._lock = threading.Lock()  # guards the next one, and appending
        self._is_done: Callable[[int], bool] | None = None  # of a cut that is due
        self._thread: BackgroundThread
        self._is_open = self._has_warned = False

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
        records, segments, has_others = list[Record](), self._segments, False
        for number in segments.numbers():
            segments.last, content = number, segments.read(number)
            if content.startswith(segments.head):
                records += _records(content, len(segments.head))
            elif content.startswith(_MAGIC) or _MAGIC.startswith(content):
                segments.delete(number)  # perhaps torn before its first record
                has_others |= len(content) > len(segments.head)
        if has_others:
            logger.warning("%s held the journal of another training, which is removed", self)
        return records

    def add(self, record: Record) -> None:
        """Append a record; a failure is logged, once."""
        if not self._is_open:
            return  # training has ended
        frame = record.frame()
        with self._lock:
            try:
                self._segments.append(frame)
            except OSError as error:
                self._warn(error)

    def cut(self, is_done: Callable[[int], bool]) -> None:
        """Forget the records of places of which this says so; soon, in a thread."""
        with self._lock:
            self._is_done = is_done

    async def close(self, engine: Engine) -> None:
        """Flush it, and let others use it; does nothing if it is not open."""
        if not self._is_open:
            return
        self._is_open = False
        self._thread.end()
        join = partial(self._thread.join, _CLOSE_SECS)
        if not await run_blocking(engine, join, _CLOSE_SECS, "asynchooks-journal-end"):
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
        is_ending = False
        while not is_ending:
            is_ending = self._thread.pause(_FLUSH_SECS)
            self._try(self._work)
        self._try(self._segments.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, CheckpointError) as error:
            self._warn(error)

    def _work(self) -> None:
        """Flush, and cut if that is due: what is left goes to a segment of its own."""
        segments, left = self._segments, list[bytes]()
        with self._lock:
            is_done, self._is_done = self._is_done, None
            flush = segments.taken(is_done is not None)
            number = segments.last = segments.last + (is_done is not None)
        flush()
        if is_done is None:
            return
        old = [each for each in segments.numbers() if each < number]
        for each in old:
            records = _records(segments.read(each), len(segments.head))
            left += [record.frame() for record in records if not is_done(record.place)]
            self._flush_meanwhile(each)
        if left:
            segments.put(number, left)
        for each in old:
            segments.delete(each)
            self._flush_meanwhile(each)

    def _flush_meanwhile(self, number: int) -> None:
        """Flush after some segments of a cut: a store may have hundreds, and take long for each."""
        if number % _FLUSH_EVERY == 0:
            with self._lock:
                flush = self._segments.taken(False)
            flush()


class _Files:
    """The segments in a directory."""

    head = b""
    """What each segment begins with."""
    last = 0
    """The highest number."""

    def __init__(self, path: str) -> None:
        self.name = os.path.abspath(path)
        self._held: DirectoryLock | None = None
        self._present: FileIO | None = None
        self._size = 0  # of its whole frames

    def open(self) -> None:
        """Keep it to this run."""
        make_directories(self.name)
        self._held = DirectoryLock(self.name)
        self._held.take()

    def close(self) -> None:
        """Let others have it."""
        try:
            self.taken(True)()
        finally:
            if self._held is not None:
                self._held.release()

    def numbers(self) -> list[int]:
        """Of all segments there are, in order."""
        has_place = os.path.isdir(self.name)  # else the disk was full
        return _numbers(os.listdir(self.name) if has_place else ())

    def append(self, frame: bytes) -> None:
        """To the present segment, or a new one."""
        if self._present is None:
            self.last, self._size = self.last + 1, 0
            self._present = FileIO(self._path(self.last), "x")
        left = memoryview(frame if self._size else self.head + frame)
        end = self._size + len(left)
        self._present.seek(self._size)  # over one that was written in part
        while left:
            left = left[self._present.write(left) :]
        self._size = end

    def taken(self, leaves: bool) -> Callable[[], None]:
        """What has all that was appended until now outlive the machine.

        Args:
            leaves: whether the next frame begins a new segment.
        """
        present = self._present
        if present is None:
            return lambda: None
        if leaves:
            self._present = None
        return partial(self._sync, present, leaves)

    def _sync(self, file: FileIO, is_left: bool) -> None:
        try:
            os.fsync(file.fileno())
            sync_directory(self.name)
        finally:
            if is_left:
                file.close()

    def put(self, number: int, frames: Iterable[bytes]) -> None:
        """Write a segment, whole or not at all, which outlives the machine."""
        new = os.path.join(self.name, "new")
        with open(new, "wb") as file:
            file.write(b"".join((self.head, *frames)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path(number))
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

    def taken(self, leaves: bool) -> Callable[[], None]:
        frames, self._frames = self._frames, []
        self.last += bool(frames)
        return partial(self.put, self.last, frames) if frames else lambda: None

    def put(self, number: int, frames: Iterable[bytes]) -> None:
        if not self._store.create(_key(number), b"".join((self.head, *frames))):
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
