"""Sinks that write a file of lines, one for each point, and continue it after a process was killed.

What a line looks like is in the sinks.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self
from weakref import WeakValueDictionary

from .. import _check
from ._append import append_whole
from ._names import apart_from
from ._sink import Point, Resume, Sink

logger = logging.getLogger("asynchooks")

_CHUNK_BYTES = 1 << 16
_ADDED_BYTES = 8
"""What is appended to a file's name: .new, or the number of one that is moved aside."""

_USERS: WeakValueDictionary[str, LinesSink] = WeakValueDictionary()
"""Which sinks of this process write to which files: two would tear each other's apart, and hooks,
sessions and threads have nothing else in common."""

Key = tuple[int, float]
"""Step and time of a point."""


_OF_LINE = ("step", "time")


class Row(NamedTuple):
    """A point on its way into the file."""

    step: int
    time: float
    cells: dict[str, Any]
    """By column."""


class _Position(NamedTuple):
    """Where the file ended when it was flushed last, for a checkpoint."""

    size: int
    first: Key | None
    last_step: float
    """No point before is of a later step."""

    @classmethod
    def of(cls, saved: object) -> Self | None:
        """The position that was saved; None if there is none, or of another kind of sink."""
        if not isinstance(saved, Mapping):
            return None
        size, first = saved.get("bytes"), saved.get("first", ())
        last_step = saved.get("last_step", math.inf)
        if type(size) is not int or size < 0 or not _check.a_number(last_step):
            return None
        if first is None:
            return cls(size, None, last_step)
        if not isinstance(first, (list, tuple)) or not all(map(_check.a_number, first)):
            return None
        return cls(size, (first[0], first[1]), last_step) if len(first) == 2 else None


class LinesSink(Sink):
    """Base of sinks that append a line for each point to a file on a local disk.

    The points of later steps than the session was restored to are removed from the file, with a
    last line that a kill has torn. Values that are in the file already are not written again. Lines
    come in the order in which the points did: that of an earlier step may stand behind others.
    """

    open_secs: ClassVar[float] = 1.0  # so that the file is continued before there are new points

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _check.place("path", path, "the path of a file", suffix=_ADDED_BYTES)
        """Of the file, absolute."""
        self._file: BinaryIO | None = None
        self._claimed = ""  # the path, if there is one, under which it is among the users
        self._start = 0  # where the first line of a point begins
        self._size = 0  # of the file: whole lines
        self._first: Key | None = None  # of the first point in the file
        self._last_step: float = 0  # no point in the file is of a later one
        self._there: dict[int, set[str]] = {}  # by step: columns that may be written again
        self._rows: list[Row] = []  # that are not in the file so far

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @abstractmethod
    def _key(self, line: bytes) -> Key | None:
        """The step and time that a line begins with; None for a line that is no point's."""

    @abstractmethod
    def _columns_in(self, line: bytes) -> Iterable[str]:
        """The columns that a line has values of."""

    @abstractmethod
    def _cells(self, point: Point) -> dict[str, Any]:
        """The values of a point by column; what it raises costs this point alone."""

    @abstractmethod
    def _lines(self, rows: Sequence[Row]) -> bytes:
        """The points as lines. It may write a new file, with another head."""

    @abstractmethod
    def _read_head(self) -> int:
        """Read what stands before the lines of points; its size in bytes.

        ValueError: the file has another head than this sink writes.
        """

    @property
    def _new_path(self) -> str:
        """Of a file that is to take the place of the present one."""
        return f"{self.path}.new"

    def open(self, resume: Resume) -> None:
        self._forget()  # an attempt before may have failed
        self._claimed = os.path.realpath(self.path)
        if _USERS.setdefault(self._claimed, self) is not self:
            raise OSError(
                f"{self.path} is being written by another sink of this process; give each sink a "
                "file of its own"
            )
        try:
            self._open(resume)
        except BaseException:
            self._forget()
            raise

    def _open(self, resume: Resume) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        is_new = resume.step == 0 and resume.position is None
        if is_new and os.path.isfile(self.path) and os.path.getsize(self.path):
            self._move_aside("it is of an earlier training")
        if os.path.exists(self._new_path):  # a process was killed while it made another file
            os.remove(self._new_path)
        self._open_file()
        try:
            self._start = self._read_head()
        except ValueError as error:
            self._forget()
            self._move_aside(str(error))
            self._open_file()
            self._start = self._read_head()
        assert self._file is not None
        end = self._file.seek(0, os.SEEK_END)
        self._size = max(self._start, self._start_of_line(end))
        self._read_first()
        start, self._last_step = self._start, 0
        position = _Position.of(resume.position)
        if position is not None and self._is_of(position) and position.last_step <= resume.step:
            self._last_step = position.last_step
            start = max(start, self._start_of_line(position.size))  # a wider file has longer lines
        self._cut(start, resume.step, notes=True)

    def write(self, point: Point) -> None:
        cells, there = self._cells(point), self._there.get(point.step)
        if there is not None:  # it was written before the process was killed, or a part of it
            cells = {name: cell for name, cell in cells.items() if name not in there}
        if cells:
            self._last_step = max(self._last_step, point.step)
            self._rows.append(Row(point.step, float(point.time), cells))

    def flush(self) -> Any:
        self._put()
        assert self._file is not None
        os.fsync(self._file.fileno())
        first = None if self._first is None else list(self._first)
        return {"bytes": self._size, "first": first, "last_step": self._last_step}

    def rewind(self, step: int) -> None:
        self._rows = [row for row in self._rows if row.step <= step]
        self._there = {at: names for at, names in self._there.items() if at <= step}
        self._last_step = min(self._last_step, step)
        self._cut(self._start, step)

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        file, self._file = self._file, None
        self._rows, self._first, self._there = [], None, {}
        if file is not None:
            file.close()
        if _USERS.get(self._claimed) is self:
            del _USERS[self._claimed]

    def _open_file(self) -> None:
        is_new = not os.path.exists(self.path)
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        if is_new:
            sync_directory(os.path.dirname(self.path))

    def _move_aside(self, reason: str) -> None:
        stem, suffix = os.path.splitext(self.path)
        number = 1
        while os.path.lexists(f"{stem}-{number}{suffix}"):
            number += 1
        os.rename(self.path, f"{stem}-{number}{suffix}")
        logger.info("%s is now %s-%d%s: %s", self.path, stem, number, suffix, reason)

    def _read_first(self) -> None:
        assert self._file is not None
        self._file.seek(self._start)
        self._first = self._key(self._file.readline()) if self._size > self._start else None

    def _is_of(self, position: _Position) -> bool:
        """Whether the file is the one that a checkpoint is about; if it is not, warn."""
        if position.first not in (None, self._first):
            problem = "begins with another point than"
        elif self._size < position.size:
            problem = f"has {self._size} bytes, fewer than the {position.size} of"
        else:
            return True
        logger.warning(
            "%s %s the file that the checkpoint was saved with: points are missing, and "
            "it is continued as it is; put the other file back if you have it, and start again",
            self.path, problem,
        )  # fmt: skip
        return False

    def _put(self) -> None:
        """Write the points, all or, if that fails, none."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        data = self._lines(rows)
        assert self._file is not None
        self._size = append_whole(self._file, data, self._size)
        if self._first is None:
            self._first = (rows[0].step, rows[0].time)

    def _cut(self, start: int, step: int, *, notes: bool = False) -> None:
        """Remove what is torn, and the lines of later steps from this offset on.

        Args:
            notes: whether to note what the other lines have.
        """
        assert self._file is not None
        end, kept = self._size, list[bytes]()
        for offset, line in self._lines_from(start):
            key = self._key(line)
            if key is not None and key[0] > step:
                end = min(end, offset)
            else:
                if end < self._size:  # it stands behind lines that are removed
                    kept.append(line)
                if notes and key is not None:
                    self._last_step = max(self._last_step, key[0])
                    self._there.setdefault(key[0], set()).update(self._columns_in(line))
        if kept:
            before = (line for offset, line in self._lines_from(0) if offset < end)
            self._replace(chain(before, kept))
        else:
            self._file.truncate(end)
            self._size = end
        self._read_first()

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Put a file with these lines in the place of the present one."""
        assert self._file is not None
        with open(self._new_path, "wb") as new:
            new.writelines(lines)
            new.flush()
            os.fsync(new.fileno())
            size = new.tell()
        shutil.copymode(self.path, self._new_path)
        self._file.close()
        try:
            os.replace(self._new_path, self.path)
        finally:
            self._open_file()
        sync_directory(os.path.dirname(self.path))
        self._size = size

    def _start_of_line(self, end: int) -> int:
        """Where the last line begins that this offset is in; 0 if it is in the first one."""
        assert self._file is not None
        while end > 0:
            start = max(0, end - _CHUNK_BYTES)
            self._file.seek(start)
            found = self._file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def _lines_from(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """The offset and content of the whole lines from there on."""
        with open(self.path, "rb") as file:  # which has a buffer
            file.seek(offset)
            while offset < self._size:
                line = file.readline()
                yield offset, line
                offset += len(line)


def sync_directory(path: str) -> None:
    """Wait until a directory's names are on the disk."""
    if sys.platform != "win32":  # which opens no directories
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def column(name: str) -> str:
    """What a metric is called in a line, which has a step and a time of its own."""
    return apart_from(_OF_LINE, name)
