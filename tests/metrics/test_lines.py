"""Files of lines: JSONL and CSV alike continue what is there, and lose no line of a user."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks.metrics import CsvSink, JsonLinesSink, Point, Resume, Sink

from .disks import AlmostFull
from .readers import json_lines, rows

NEW = Resume(0, None)


def points(first: int, last: int, **values: float) -> list[Point]:
    return [Point(step, 1000.0 + step, values or {"loss": 0.5}) for step in range(first, last + 1)]


class Case:
    """One of the sinks, with a file for it."""

    def __init__(self, new: Callable[[Path], Sink], path: Path) -> None:
        self.new, self.path = new, path

    def open(self, resume: Resume = NEW) -> Sink:
        sink = self.new(self.path)
        sink.open(resume)
        return sink

    def write(self, first: int, last: int, resume: Resume = NEW, **values: float) -> Any:
        """Let a process write points and end; returns its last position."""
        sink = self.open(resume)
        for point in points(first, last, **values):
            sink.write(point)
        position = sink.flush()
        sink.close()
        return position

    def steps(self, path: Path | None = None) -> list[int]:
        path = path or self.path
        read: Any = json_lines if path.suffix == ".jsonl" else rows
        return [int(each["step"]) for each in read(path)]


@pytest.fixture(params=[JsonLinesSink, CsvSink])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    name = "m.jsonl" if request.param is JsonLinesSink else "m.csv"
    return Case(request.param, tmp_path / "logs" / "run" / name)


def test_missing_directories_are_made_and_nothing_is_written_before_a_flush(case: Case) -> None:
    sink = case.open()
    sink.write(points(1, 1)[0])
    assert case.path.read_bytes() == b""
    sink.flush()
    assert case.steps() == [1]
    sink.close()


@pytest.mark.parametrize("time", [1000.0, 1001.0])  # they may be equal, as in virtual time
def test_two_points_of_one_step_are_both_kept(case: Case, time: float) -> None:
    two = [Point(1, 1000.0, {"loss": 1.0}), Point(1, time, {"reward": 2.0})]
    sink = case.open()
    for point in two:
        sink.write(point)
    position = sink.flush()
    sink.close()
    with case.path.open("r+b") as file:  # the process was killed between the two
        file.truncate(len(b"".join(file.readlines()[:-1])))
    again = case.open(Resume(1, position))
    for point in two:
        again.write(point)
    again.flush()
    again.close()
    assert case.steps() == [1, 1]


def test_a_rewind_to_before_all_points_leaves_an_empty_file_to_go_on_in(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    sink = case.open()
    for point in points(1, 3):
        sink.write(point)
    sink.flush()
    sink.rewind(0)
    sink.write(points(1, 1)[0])
    position = sink.flush()
    sink.close()
    case.write(2, 2, Resume(1, position))
    assert case.steps() == [1, 2]
    assert not caplog.records  # the file is the one of the position


@pytest.mark.parametrize("torn", [b"{", b"12,10", b"\xff\x00"])
def test_rewinds_find_lines_in_files_longer_than_what_is_read_at_once(
    case: Case, torn: bytes
) -> None:
    case.write(1, 5_000)  # some 200 kB
    with case.path.open("ab") as file:
        file.write(torn)
    case.write(11, 11, Resume(10, None))
    assert case.steps() == list(range(1, 12))


def test_a_new_training_moves_the_file_of_an_earlier_one_aside(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for last in (1, 2, 3):
        case.write(1, last)
    stem, suffix = case.path.stem, case.path.suffix
    assert case.steps() == [1, 2, 3]
    assert case.steps(case.path.with_name(f"{stem}-1{suffix}")) == [1]
    assert case.steps(case.path.with_name(f"{stem}-2{suffix}")) == [1, 2]
    assert f"{stem}-2{suffix}: it is of an earlier training" in caplog.text


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
    position = case.write(1, 0)
    position = case.write(1, 3, Resume(0, position))
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
    sink: Any = case.open(Resume(2, None))
    sink.write(points(3, 3)[0])
    good = sink._file  # no disk is full on demand
    sink._file = AlmostFull(good, OSError("no space left"))
    with pytest.raises(OSError, match="no space left"):
        sink.flush()
    sink._file = good
    sink.write(points(4, 4)[0])
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
