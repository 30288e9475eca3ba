"""CsvSink: a table with a row for each point, and a column for each metric."""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._lines import Key, LinesSink, column, sync_directory
from ._sink import Histogram, Point, Resume


class CsvSink(LinesSink):
    """Writes each point as a row, under the columns `step`, `time`, and one for each metric.

    `pandas.read_csv(path)` and Python's `csv` read it: UTF-8, commas, a header. NaN and infinities
    are `nan`, `inf` and `-inf`; a cell is empty where a point has no such metric. A metric that
    comes first in a later point gets a further column: the file is written again, beside the old
    one, and takes its place at once. Of a histogram `h` there are the columns `h/mean`, `h/std`,
    `h/min` and `h/max`. A metric that is called step or time is written as `step_` or `time_`.

    Continues the file where a session is restored, each step once: a process that was killed may
    have written later steps, which are removed. A new training (step 0) moves a file that is there
    already aside, as metrics-1.csv beside metrics.csv. What was flushed outlives a power cut.

    Unlike JsonLinesSink, it writes the whole file anew when a metric is added to it.

    Args:
        path: of the file; missing directories are made. One sink of one process writes to it.

    Raises:
        TypeError: `path` is no path.

    Example:
        hooks = [MetricsHook(CsvSink("logs/metrics.csv"), "loss", every_n_steps=10)]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._columns: list[str] = []

    def open(self, resume: Resume) -> None:
        super().open(resume)
        if os.path.exists(self._new_path):  # a process was killed while it made a wider file
            os.remove(self._new_path)

    @property
    def _new_path(self) -> str:
        return f"{self.path}.new"

    def _key(self, line: bytes) -> Key | None:
        try:
            step, time = line.split(b",", 2)[:2]
            return int(step), float(time)
        except ValueError:  # of another program
            return None

    def _read_head(self) -> int:
        self._columns = []
        assert self._file is not None
        self._file.seek(0)
        head = self._file.readline()
        if not head.endswith(b"\n"):
            return 0
        columns = next(csv.reader([head.decode(errors="replace")]), [])
        if columns[:2] != ["step", "time"]:
            raise ValueError(f"its first columns are {columns[:2]}, not step and time")
        self._columns = columns
        return len(head)

    def _lines(self, points: Sequence[Point]) -> bytes:
        rows = [_row(point) for point in points]
        known = dict.fromkeys(self._columns or ["step", "time"])
        columns = list(known | {name: None for row in rows for name in row})
        if columns != self._columns:
            self._widen(columns)
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writerows(rows)
        return text.getvalue().encode()

    def _widen(self, columns: list[str]) -> None:
        """Put a file with these columns in the place of the present one, with the same rows."""
        assert self._file is not None
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(columns)
        head = text.getvalue().encode()
        empty = b"," * (len(columns) - len(self._columns)) + b"\n"
        with open(self._new_path, "wb") as new, open(self.path, "rb") as old:
            new.write(head)
            old.seek(self._start)
            new.writelines(line[:-1] + empty for line in _whole_lines(old, self._size))
            new.flush()
            os.fsync(new.fileno())
            size = new.tell()
        if os.path.exists(self.path):
            shutil.copymode(self.path, self._new_path)
        self._file.close()
        try:
            os.replace(self._new_path, self.path)
        finally:
            self._open_file()
        sync_directory(os.path.dirname(self.path))
        self._columns, self._start, self._size = columns, len(head), size


def _whole_lines(file: Any, end: int) -> Iterator[bytes]:
    while file.tell() < end:
        yield file.readline()


def _row(point: Point) -> Mapping[str, str]:
    row = {"step": str(point.step), "time": repr(float(point.time))}
    for name, value in point.values.items():
        cells = _cells_of(name, value) if isinstance(value, Histogram) else {name: value}
        row |= {_one_line(column(key)): repr(float(cell)) for key, cell in cells.items()}
    return row


def _cells_of(name: str, value: Histogram) -> dict[str, float]:
    mean = value.total / value.num if value.num else math.nan
    variance = max(0.0, value.total_of_squares / value.num - mean**2) if value.num else math.nan
    return {
        f"{name}/mean": mean,
        f"{name}/std": math.sqrt(variance),
        f"{name}/min": value.least,
        f"{name}/max": value.greatest,
    }


def _one_line(name: str) -> str:
    """A name without line ends: the head of the file is one line."""
    return " ".join(name.splitlines())
