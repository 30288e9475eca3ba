"""CsvSink: a table whose columns grow with the metrics."""

import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from asynchooks.metrics import CsvSink, Histogram, Point, Resume

from .readers import NEW, rows, written


def test_a_later_metric_is_a_further_column_and_empty_in_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    sink = CsvSink(path)
    sink.open(NEW)
    sink.write(Point(1, 1.0, {"a": 1.0}))
    sink.flush()
    path.chmod(0o640)
    sink.write(Point(2, 2.0, {"b": 2.0}))
    sink.write(Point(3, 3.0, {"c": 3.0, "a": 4.0}))
    sink.flush()
    sink.close()
    assert path.read_text() == "step,time,a,b,c\n1,1.0,1.0,,\n2,2.0,,2.0,\n3,3.0,4.0,,3.0\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["m.csv"]


def test_columns_of_an_earlier_process_are_kept_and_what_a_killed_one_left_is_removed(
    tmp_path: Path,
) -> None:
    (tmp_path / "m.csv.new").write_text("step,time,a,b\n1,")
    sink = CsvSink(tmp_path / "m.csv")
    for step, name in ((1, "a"), (2, "b"), (3, "a")):
        written(sink, Point(step, 0.0, {name: 1.0}), resume=Resume(step - 1, {"lines": 0}))
    assert Path(sink.path).read_text() == "step,time,a,b\n1,0.0,1.0,\n2,0.0,,1.0\n3,0.0,1.0,\n"
    assert os.listdir(tmp_path) == ["m.csv"]


def test_a_histogram_is_four_columns(tmp_path: Path) -> None:
    spread, empty = Histogram.of(np.array([1.0, 3.0])), Histogram.of(np.array([math.nan]))
    written(CsvSink(tmp_path / "m.csv"), Point(1, 0.0, {"w": spread, "e": empty}))
    [row] = rows(tmp_path / "m.csv")
    names = [f"w/{each}" for each in ("mean", "std", "min", "max")]
    assert [row[name] for name in names] == ["2.0", "1.0", "1.0", "3.0"]
    assert row["e/mean"] == row["e/std"] == "nan"


@pytest.mark.parametrize(
    "foreign",
    ["epoch,loss\n1,2\n", 'step,time,"a\n1,2,3\n', f"step,time,{'a' * 200_000}\n1,2,3\n"],
    ids=["columns", "quote", "long"],
)
def test_a_table_of_another_program_is_moved_aside(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(foreign)
    written(CsvSink(path), Point(5, 0.0, {"a": 1.0}), resume=Resume(4, None))
    assert path.read_text() == "step,time,a\n5,0.0,1.0\n"
    assert (tmp_path / "m-1.csv").read_text() == foreign
