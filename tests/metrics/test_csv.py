"""CsvSink: a table whose columns grow with the metrics."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from asynchooks.metrics import CsvSink, Histogram, Point, Resume

from .readers import rows

NEW = Resume(0, None)


def opened(path: Path, resume: Resume = NEW) -> CsvSink:
    sink = CsvSink(path)
    sink.open(resume)
    return sink


def written(path: Path, *points: Point, resume: Resume = NEW) -> str:
    """What is in the file at the end of a sink that was given these."""
    sink = opened(path, resume)
    for point in points:
        sink.write(point)
    sink.flush()
    sink.close()
    return path.read_text()


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    values = {"loss": 0.1, "größe, rel.": 1e-300, 'a "b"': math.nan, "c": -math.inf}
    written(tmp_path / "m.csv", Point(7, 1893456000.123456, {**values, "d": np.float64(0.25)}))
    [row] = rows(tmp_path / "m.csv")
    assert row == {
        "step": "7", "time": "1893456000.123456", "loss": "0.1", "größe, rel.": "1e-300",
        'a "b"': "nan", "c": "-inf", "d": "0.25",
    }  # fmt: skip


def test_a_later_metric_is_a_further_column_and_empty_in_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    sink = opened(path)
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


def test_columns_of_an_earlier_process_are_kept(tmp_path: Path) -> None:
    for step, name in ((1, "a"), (2, "b"), (3, "a")):
        resume = Resume(step - 1, {"bytes": 0, "first": None})
        text = written(tmp_path / "m.csv", Point(step, 0.0, {name: 1.0}), resume=resume)
    assert text == "step,time,a,b\n1,0.0,1.0,\n2,0.0,,1.0\n3,0.0,1.0,\n"


def test_what_a_killed_process_left_of_a_wider_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "m.csv.new").write_text("step,time,a,b\n1,")
    opened(tmp_path / "m.csv").close()
    assert os.listdir(tmp_path) == ["m.csv"]


def test_a_histogram_is_four_columns(tmp_path: Path) -> None:
    spread, empty = Histogram.of(np.array([1.0, 3.0])), Histogram.of(np.array([math.nan]))
    written(tmp_path / "m.csv", Point(1, 0.0, {"w": spread, "e": empty}))
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
    text = written(path, Point(5, 0.0, {"a": 1.0}), resume=Resume(4, None))
    assert text == "step,time,a\n5,0.0,1.0\n"
    assert (tmp_path / "m-1.csv").read_text() == foreign


@pytest.mark.parametrize(
    ("foreign", "kept"),
    [(f'step,time,a\n1,2,{"x" * 200_000}\n2,3,"\n', True), ("step,ti", False)],
    ids=["rows", "a torn header"],
)
def test_rows_of_another_program_stay_where_they_are(
    tmp_path: Path, foreign: str, kept: bool
) -> None:
    path = tmp_path / "m.csv"
    path.write_text(foreign)
    text = written(path, Point(5, 0.0, {"a": 1.0}), resume=Resume(4, None))
    assert text == (foreign if kept else "step,time,a\n") + "5,0.0,1.0\n"
