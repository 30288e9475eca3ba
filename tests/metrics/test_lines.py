"""Files of lines: JSONL and CSV alike continue what is there, and lose no line of a user."""

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks.metrics import CsvSink, Histogram, JsonLinesSink, Point, Resume, Sink

from ..hooks.event_files import largest_file
from .readers import NEW, json_lines, rows, written


class Case:
    """One of the sinks, with a file for it."""

    def __init__(self, new: Callable[[Path], Sink], path: Path) -> None:
        self.new, self.path = new, path
        self.read: Any = json_lines if path.suffix == ".jsonl" else rows

    def open(self, resume: Resume = NEW) -> Sink:
        sink = self.new(self.path)
        sink.open(resume)
        return sink

    def write(self, first: int, last: int, resume: Resume = NEW) -> Any:
        """Let a process write points and end; returns its last position."""
        return written(self.new(self.path), *map(point, range(first, last + 1)), resume=resume)

    def steps(self, name: str = "") -> list[int]:
        """Those in the file, or in another one beside it."""
        path = self.path.with_stem(name) if name else self.path
        return [int(each["step"]) for each in self.read(path)]


def point(step: int) -> Point:
    return Point(step, 1000.0 + step, {"loss": 0.5})


@pytest.fixture(params=[JsonLinesSink, CsvSink])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    name = "m.jsonl" if request.param is JsonLinesSink else "m.csv"
    return Case(request.param, tmp_path / "logs" / "run" / name)


@pytest.mark.parametrize("number", [0.1, 1e-300, -2.0, np.float64(0.25), math.nan, -math.inf])
def test_names_and_numbers_come_back_as_they_were(case: Case, number: float) -> None:
    names = ["loss", "größe, rel.", 'a "b"']
    written(case.new(case.path), Point(7, 1893456000.123456, dict.fromkeys(names, number)))
    [line] = case.read(case.path)
    found = {name: repr(float(value)) for name, value in line.items()}
    expected = dict.fromkeys(names, repr(float(number)))
    assert found == {"step": "7.0", "time": "1893456000.123456", **expected}


def test_a_histogram_is_an_object_of_its_fields_in_json(tmp_path: Path) -> None:
    spread = Histogram.of(np.array([0.0, 1.0, 1.0, 2.0]), 2)
    empty = Histogram.of(np.array([math.nan]), 1)
    written(JsonLinesSink(tmp_path / "m"), Point(1, 0.0, {"w": spread, "none": empty}))
    [line] = json_lines(tmp_path / "m")
    assert line["w"] == {
        "counts": [1, 3],
        "edges": [0.0, 1.0, 2.0],
        "least": 0.0,
        "greatest": 2.0,
        "num": 4,
        "total": 4.0,
        "total_of_squares": 6.0,
    }
    assert line["none"]["least"] == "NaN"


@pytest.mark.parametrize(
    ("new", "foreign", "line"),
    [
        (
            JsonLinesSink,
            b'{"epoch": 1}\n[]\n{"step": "x", "time": 0}\n',
            b'{"step": 5, "time": 0.0, "a": 1.0}\n',
        ),
        (JsonLinesSink, b"[" * 100_000 + b"\n", b'{"step": 5, "time": 0.0, "a": 1.0}\n'),
        (CsvSink, b'step,time,a\n1,2,%s\n2,3,"\n' % (b"x" * 200_000), b"5,0.0,1.0\n"),
    ],
    ids=["others", "nested", "rows"],
)
def test_lines_of_another_program_stay_where_they_are(
    tmp_path: Path, new: Any, foreign: bytes, line: bytes
) -> None:
    (tmp_path / "m").write_bytes(foreign)
    written(new(tmp_path / "m"), Point(5, 0.0, {"a": 1.0}), resume=Resume(4, None))
    assert (tmp_path / "m").read_bytes() == foreign + line


def test_missing_directories_are_made_and_nothing_is_written_before_a_flush(case: Case) -> None:
    sink = case.open()
    sink.write(point(1))
    assert case.path.read_bytes() == b""
    sink.flush()
    assert case.steps() == [1]
    sink.close()


@pytest.mark.parametrize("time", [1000.0, 1001.0])  # they may be equal, as in virtual time
def test_two_points_of_one_step_are_both_kept(case: Case, time: float) -> None:
    two = [Point(1, 1000.0, {"loss": 1.0}), Point(1, time, {"reward": 2.0})]
    position = written(case.new(case.path), *two)
    with case.path.open("r+b") as file:  # the process was killed between the two
        file.truncate(len(b"".join(file.readlines()[:-1])))
    written(case.new(case.path), *two, resume=Resume(1, position))
    assert case.steps() == [1, 1]


def test_a_new_training_moves_the_file_of_an_earlier_one_aside(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for last in (1, 2, 3):
        case.write(1, last)
    assert (case.steps(), case.steps("m-1"), case.steps("m-2")) == ([1, 2, 3], [1], [1, 2])
    assert f"m-2{case.path.suffix}: it is of an earlier training" in caplog.text


@pytest.mark.parametrize("num_bytes", [0, 60])
def test_a_file_that_has_lost_lines_is_warned_of_and_continued(
    case: Case, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    position = case.write(1, 9)
    os.truncate(case.path, num_bytes)
    case.write(10, 11, Resume(9, position))
    assert case.steps()[-2:] == [10, 11]
    assert "points are missing" in caplog.text


def test_an_intact_file_is_continued_without_a_warning_and_never_replaced(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """Else those who follow it as it grows would lose it."""
    position = case.write(1, 3, Resume(0, case.write(1, 0)))
    file = case.path.stat().st_ino
    case.write(4, 6, Resume(3, position))
    assert case.steps() == [1, 2, 3, 4, 5, 6]
    assert case.path.stat().st_ino == file
    assert [each.name for each in case.path.parent.iterdir()] == [case.path.name]
    assert not caplog.records


def test_a_directory_that_cannot_be_made_and_one_in_its_place_are_errors_of_open(
    case: Case,
) -> None:
    case.path.parent.parent.write_bytes(b"a file")
    with pytest.raises(OSError, match="logs"):
        case.open()
    case.path.parent.parent.unlink()
    case.path.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        case.open()
    case.path.rmdir()
    case.write(1, 1)
    assert case.steps() == [1]


def test_a_full_disk_loses_the_points_that_it_meets_and_no_line_is_torn(case: Case) -> None:
    case.write(1, 2)
    sink = case.open(Resume(2, None))
    sink.write(point(3))
    with largest_file(case.path.stat().st_size + 7), pytest.raises(OSError, match="too large"):
        sink.flush()
    sink.write(point(4))
    sink.flush()
    sink.close()
    assert case.steps() == [1, 2, 4]


@pytest.mark.parametrize("bad", [3, b"metrics"])
def test_a_path_that_is_none_is_refused(case: Case, bad: Any) -> None:
    with pytest.raises(TypeError, match="give the path of a file"):
        case.new(bad)


def test_two_sinks_of_one_process_do_not_write_to_one_file(case: Case) -> None:
    first = case.open()
    for _ in range(2):
        with pytest.raises(OSError, match="written by another sink .* a file of its own"):
            case.open()
    first.close()
    case.write(1, 2)
    assert case.steps() == [1, 2]
