"""CsvSink: a table with a row for each point, and a column for each metric."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from typing import Any

from ._lines import LinesSink, Row, column
from ._names import Names
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

    Unlike JsonLinesSink, it writes the whole file again when a metric is added to it.

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
        self._names = Names(repr(self), _one_line)
        super().open(resume)

    def _read_head(self, line: bytes) -> bytes:
        self._columns = []
        columns = _fields_of(line)
        if columns is None:
            raise ValueError("its first line is no row of a table")
        if columns and columns[:2] != ["step", "time"]:
            raise ValueError(f"its first columns are {columns[:2]}, not step and time")
        self._columns = columns
        return line

    def _columns_in(self, line: bytes) -> list[str]:
        cells = _fields_of(line) or []
        return [name for name, cell in zip(self._columns, cells, strict=False) if cell]

    def _cells(self, point: Point) -> dict[str, Any]:
        numbers = self._names.numbers(point.values, _parts_of)
        "".join(numbers).encode()  # else an error of the whole file
        return {name: float(number) for name, number in numbers.items()}

    def _encoded(self, rows: Sequence[Row]) -> bytes:
        known = dict.fromkeys(self._columns)
        columns = list(known | {name: None for row in rows for name in row})
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        if num_new := len(columns) - len(self._columns):
            writer.writeheader()
            empty = b"," * num_new + b"\n"
            wider = (line[:-1] + empty for line in self._whole_lines())
            self._rewrite(text.getvalue().encode(), wider)
            text.truncate(text.seek(0))
        writer.writerows(rows)
        return text.getvalue().encode()


def _fields_of(line: bytes) -> list[str] | None:
    """What stands in a line; None for one that is no whole row: of another program."""
    try:
        return next(csv.reader([line.decode(errors="replace")], strict=True), [])
    except csv.Error:  # it goes on in the next line, or has a field that is too long
        return None


def _parts_of(value: Histogram) -> dict[str, float]:
    mean = value.total / value.num if value.num else math.nan
    variance = max(0.0, value.total_of_squares / value.num - mean**2) if value.num else math.nan
    return {"mean": mean, "std": math.sqrt(variance), "min": value.least, "max": value.greatest}


def _one_line(name: str) -> str:
    """A name without line ends: the head of the file is one line."""
    return " ".join(column(name).splitlines())
