"""Sinks that write a file of lines, one for each point, and continue it after a process was killed.

What a line looks like is in the sinks.
"""

from __future__ import annotations

import logging
import os
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar
from weakref import WeakValueDictionary

from .. import _check
from ._append import append_whole
from ._sink import Point, Resume, Sink

logger = logging.getLogger("asynchooks")

_CHUNK_BYTES = 1 << 16
_ADDED_BYTES = 8
"""What is appended to a file's name: .new, or the number of one that is moved aside."""

_USERS: WeakValueDictionary[str, LinesSink] = WeakValueDictionary()
"""Which sinks of this process write to which files: two would tear each other's apart, and hooks,
sessions and threads have nothing else in common."""

Key = tuple[int, float]
"""Step and time of a point: those of the points in a file only grow."""


class LinesSink(Sink):
    """Base of sinks that append a line for each point to a file on a local disk.

    The points of steps that the session was not restored to are cut off the end of the file, with
    a last line that a kill has torn. Points that are in the file already are not written again.
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
        self._there: Key | None = None  # of the last one, if it may be written again
        self._points: list[Point] = []  # that are not in the file so far

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @abstractmethod
    def _key(self, line: bytes) -> Key | None:
        """The step and time that a line begins with; None for a line that is no point's."""

    @abstractmethod
    def _lines(self, points: Sequence[Point]) -> bytes:
        """The points as lines. It may write a new file, with another head."""

    @abstractmethod
    def _read_head(self) -> int:
        """Read what stands before the lines of points; its size in bytes.

        ValueError: the file has another head than this sink writes.
        """

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
        self._open_file()
        try:
            self._start = self._read_head()
        except ValueError as error:
            self._forget()
            self._move_aside(str(error))
            self._open_file()
            self._start = self._read_head()
        assert self._file is not None
        self._size = max(self._start, self._end_of_lines())
        self._file.seek(self._start)
        self._first = self._key(self._file.readline())
        if isinstance(resume.position, Mapping) and "first" in resume.position:
            self._compare(resume.position)  # else it is of another kind of sink
        self._there = self._cut(resume.step)

    def write(self, point: Point) -> None:
        if self._there is not None:
            if (point.step, point.time) <= self._there:
                return  # it was written before the process was killed
            self._there = None
        self._points.append(point)

    def flush(self) -> Any:
        self._put()
        assert self._file is not None
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "first": None if self._first is None else list(self._first)}

    def rewind(self, step: int) -> None:
        self._points = [point for point in self._points if point.step <= step]
        self._cut(step)
        self._there = None

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        file, self._file = self._file, None
        self._points, self._first, self._there = [], None, None
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

    def _compare(self, position: Mapping[str, Any]) -> None:
        """Warn if the file is not the one that a checkpoint is about."""
        first = None if self._first is None else list(self._first)
        if position["first"] not in (None, first):
            problem = "begins with another point than"
        elif self._size < position["bytes"]:
            problem = f"has {self._size} bytes, fewer than the {position['bytes']} of"
        else:
            return
        logger.warning(
            "%s %s the file that the checkpoint was saved with: points are missing, and "
            "it is continued as it is; put the other file back if you have it, and start again",
            self.path, problem,
        )  # fmt: skip

    def _put(self) -> None:
        """Write the points, all or, if that fails, none."""
        points, self._points = self._points, []
        if not points:
            return
        data = self._lines(points)
        assert self._file is not None
        self._size = append_whole(self._file, data, self._size)
        if self._first is None:
            self._first = (points[0].step, points[0].time)

    def _cut(self, step: int) -> Key | None:
        """Remove what is torn, and the lines of later steps; returns the last point that stays."""
        assert self._file is not None
        last: Key | None = None
        for start, line in self._lines_from_end():
            last = self._key(line)
            if last is None or last[0] <= step:
                break
            self._size, last = start, None
        self._file.truncate(self._size)
        if self._size == self._start:
            self._first = None
        return last

    def _end_of_lines(self) -> int:
        """Where the last whole line of the file ends; 0 if there is none."""
        assert self._file is not None
        end = self._file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _CHUNK_BYTES)
            self._file.seek(start)
            found = self._file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def _lines_from_end(self) -> Iterator[tuple[int, bytes]]:
        """The offset and content of the lines of points, the last one first."""
        assert self._file is not None
        start, rest = self._size, b""
        while start > self._start:
            end, start = start, max(self._start, start - _CHUNK_BYTES)
            self._file.seek(start)
            block = self._file.read(end - start) + rest
            lines = block.split(b"\n")[:-1]  # it ends with a whole line
            rest = b"" if start == self._start else lines.pop(0) + b"\n"  # may begin before it
            offset = start + len(block)
            for line in reversed(lines):
                offset -= len(line) + 1
                yield offset, line


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
    return f"{name}_" if name in ("step", "time") else name
