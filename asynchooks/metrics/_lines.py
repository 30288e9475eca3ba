"""Sinks that write a file of lines, one for each point, and continue it after a process was killed.

A position is a number of lines: it holds whatever a line becomes that is rewritten with further
columns. What a line looks like is in the sinks; each begins with the step.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar
from weakref import WeakValueDictionary

from .. import _check
from ._append import append_whole
from ._names import apart_from
from ._sink import Point, Resume, Sink

logger = logging.getLogger("asynchooks")

_ADDED_BYTES = 8
"""What is appended to a file's name: .new, or the number of one that is moved aside."""
_OF_LINE = ("step", "time")
_STEP = re.compile(rb'(?:\{"step": )?(\d{1,19}),')
"""The beginning of a point's line. Other lines are of another program, and stay as they are."""
_USERS: WeakValueDictionary[str, LinesSink] = WeakValueDictionary()
"""Which sinks of this process write to which files: two would tear each other's apart, and hooks,
sessions and threads have nothing else in common."""


Row = dict[str, Any]
"""A point on its way into the file: its step, its time, and its values by column."""


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
        self._head = b""  # what stands before the lines of points
        self._num_lines = self._size = 0  # of the file: lines behind the head, and bytes
        self._there: dict[int, set[str]] = {}  # by step: columns that may be written again
        self._rows: list[Row] = []  # that are not in the file so far

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @abstractmethod
    def _columns_in(self, line: bytes) -> Iterable[str]:
        """The columns that a line has values of."""

    @abstractmethod
    def _cells(self, point: Point) -> dict[str, Any]:
        """The values of a point by column; what it raises costs this point alone."""

    @abstractmethod
    def _encoded(self, rows: Sequence[Row]) -> bytes:
        """The points as lines. It may `_rewrite` the file, with another head."""

    def _read_head(self, line: bytes) -> bytes:
        """What the first line of the file has before the lines of points.

        ValueError: the file is of another program (says why).
        """
        return b""

    def open(self, resume: Resume) -> None:
        self.close()  # an attempt before may have failed
        self._claimed = os.path.realpath(self.path)
        if _USERS.setdefault(self._claimed, self) is not self:
            raise OSError(
                f"{self.path} is being written by another sink of this process; give each sink a "
                "file of its own"
            )
        try:
            self._open(resume)
        except BaseException:
            self.close()
            raise

    def _open(self, resume: Resume) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        is_new = resume.step == 0 and resume.position is None
        if is_new and os.path.isfile(self.path) and os.path.getsize(self.path):
            self._move_aside("it is of an earlier training")
        try:
            self._open_file()
        except ValueError as error:
            self._move_aside(str(error))
            self._open_file()
        num_known = 0
        if isinstance(resume.position, Mapping):  # else there is none
            saved = resume.position.get("lines", 0)  # none, if it is of another kind of sink
            num_known = saved if type(saved) is int else 0
        num_there = sum(1 for _ in self._whole_lines())
        if num_there < num_known:
            logger.warning(
                "%s has %d lines, fewer than the %d of the file that the checkpoint was saved "
                "with: points are missing, and it is continued as it is; put the other file back "
                "if you have it, and start again",
                self.path,
                num_there,
                num_known,
            )
            num_known = 0
        self._keep(resume.step, num_known)

    def write(self, point: Point) -> None:
        cells, there = self._cells(point), self._there.get(point.step)
        if there is not None:  # it was written before the process was killed, or a part of it
            cells = {name: cell for name, cell in cells.items() if name not in there}
        if cells:
            self._rows.append({"step": point.step, "time": float(point.time), **cells})

    def flush(self) -> Any:
        rows, self._rows = self._rows, []
        assert self._file is not None
        if rows:  # all of them are written or, if that fails, none
            data = self._encoded(rows)
            self._size = append_whole(self._file, data, self._size)
            self._num_lines += len(rows)
        os.fsync(self._file.fileno())
        return {"lines": self._num_lines}

    def rewind(self, step: int) -> None:
        self._rows = [row for row in self._rows if row["step"] <= step]
        self._there = {at: names for at, names in self._there.items() if at <= step}
        self._keep(step, sys.maxsize)

    def close(self) -> None:
        file, self._file = self._file, None
        self._rows, self._there = [], {}
        if file is not None:
            file.close()
        if _USERS.get(self._claimed) is self:
            del _USERS[self._claimed]

    def _open_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        self._size = self._file.seek(0, os.SEEK_END)
        sync_directory(os.path.dirname(self.path))
        with open(self.path, "rb") as file:
            line = file.readline()
        self._head = self._read_head(line if line.endswith(b"\n") else b"")

    def _move_aside(self, reason: str) -> None:
        stem, suffix = os.path.splitext(self.path)
        number = 1
        while os.path.lexists(f"{stem}-{number}{suffix}"):
            number += 1
        os.rename(self.path, f"{stem}-{number}{suffix}")
        logger.info("%s is now %s-%d%s: %s", self.path, stem, number, suffix, reason)

    def _whole_lines(self) -> Iterator[bytes]:
        """The lines behind the head, save a last one that a kill has torn."""
        with open(self.path, "rb") as file:
            file.seek(len(self._head))
            yield from (line for line in file if line.endswith(b"\n"))

    def _keep(self, step: int, num_known: int) -> None:
        """Remove what is torn, and the lines of later steps.

        Args:
            num_known: of so many lines it is not noted what they have.
        """

        def kept() -> Iterator[bytes]:
            for number, line in enumerate(self._whole_lines()):
                found = _STEP.match(line)
                if found is not None:
                    at = int(found[1])
                    if at > step:
                        continue
                    if number >= num_known:
                        self._there.setdefault(at, set()).update(self._columns_in(line))
                yield line

        self._rewrite(self._head, kept())

    def _rewrite(self, head: bytes, lines: Iterable[bytes]) -> None:
        """Put a file with this head and these lines in the place of the present one."""
        new_path, num = f"{self.path}.new", 0
        with open(new_path, "wb") as new:
            new.write(head)
            for num, line in enumerate(lines, 1):  # noqa: B007 - their number is kept
                new.write(line)
            new.flush()
            os.fsync(new.fileno())
            is_same = new.tell() == self._size and head == self._head
        self._num_lines = num
        if is_same:  # those who follow the file as it grows are not to lose it
            os.remove(new_path)
            return
        shutil.copymode(self.path, new_path)
        assert self._file is not None
        self._file.close()
        try:
            os.replace(new_path, self.path)
        finally:
            self._open_file()


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
