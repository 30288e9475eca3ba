"""Files of lines: JSONL and CSV alike continue what is there, and lose no line of a user."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks.metrics import CsvSink, JsonLinesSink, Point, Resume, Sink

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


def test_a_restored_session_continues_the_file_without_the_later_steps(case: Case) -> None:
    position = case.write(1, 9)
    case.write(7, 8, Resume(6, position))
    assert case.steps() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("torn", [b"{", b"12,10", b"12", b"\xff\x00"])
def test_a_torn_last_line_is_removed(case: Case, torn: bytes) -> None:
    position = case.write(1, 3)
    with case.path.open("ab") as file:
        file.write(torn)
    case.write(4, 4, Resume(3, position))
    assert case.steps() == [1, 2, 3, 4]


def test_points_that_are_there_are_left_out_where_no_position_is_known(case: Case) -> None:
    case.write(1, 5)  # and killed before a checkpoint has the position of a flush
    case.write(1, 7, Resume(6, None))
    assert case.steps() == [1, 2, 3, 4, 5, 6, 7]


def test_two_points_of_one_step_are_both_kept(case: Case) -> None:
    sink = case.open()
    early, late = Point(1, 1000.0, {"loss": 1.0}), Point(1, 1001.0, {"reward": 2.0})
    for point in (early, late):
        sink.write(point)
    position = sink.flush()
    sink.close()
    with case.path.open("r+b") as file:  # the process was killed between the two
        file.truncate(len(b"".join(file.readlines()[:-1])))
    again = case.open(Resume(1, position))
    for point in (early, late):
        again.write(point)
    again.flush()
    again.close()
    assert case.steps() == [1, 1]


def test_points_of_one_step_at_one_time_are_all_kept(case: Case) -> None:
    sink = case.open()
    for value in (1.0, 2.0):  # as in virtual time
        sink.write(Point(1, 1000.0, {"loss": value}))
        sink.flush()
    sink.close()
    assert case.steps() == [1, 1]


def test_the_position_of_another_kind_of_sink_is_left_alone(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.write(1, 5)
    for position in ({"file": "events", "bytes": 10**9}, 7):
        case.write(3, 4, Resume(2, position))
        assert case.steps() == [1, 2, 3, 4]
    assert not caplog.records


def test_a_rewind_removes_later_steps_of_the_file_and_of_memory(case: Case) -> None:
    sink = case.open()
    for point in points(1, 6):
        sink.write(point)
    sink.flush()
    for point in points(7, 8):
        sink.write(point)
    sink.rewind(4)
    sink.write(Point(5, 2000.0, {"loss": 9.0}))
    sink.flush()
    sink.close()
    assert case.steps() == [1, 2, 3, 4, 5]


def test_a_rewind_to_before_all_points_leaves_an_empty_file_to_go_on_in(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    sink = case.open()
    for point in points(1, 3):
        sink.write(point)
    sink.flush()
    sink.rewind(0)
    sink.write(Point(1, 3000.0, {"loss": 1.0}))
    position = sink.flush()
    sink.close()
    assert case.steps() == [1]
    case.write(2, 2, Resume(1, position))
    assert case.steps() == [1, 2]
    assert not caplog.records  # the file is the one of the position


def test_rewinds_find_lines_in_files_longer_than_what_is_read_at_once(case: Case) -> None:
    num = 5_000  # some 200 kB
    case.write(1, num)
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


def test_an_empty_file_is_used_as_it_is(case: Case) -> None:
    case.open().close()
    case.write(1, 1)
    assert [path.name for path in case.path.parent.iterdir()] == [case.path.name]


@pytest.mark.parametrize("num_bytes", [0, 60])
def test_a_file_that_has_lost_lines_is_warned_of_and_continued(
    case: Case, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    position = case.write(1, 9)
    os.truncate(case.path, num_bytes)
    case.write(10, 11, Resume(9, position))
    assert case.steps()[-2:] == [10, 11]
    assert "points are missing" in caplog.text


def test_an_intact_file_is_continued_without_a_warning(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    position = case.write(1, 0)
    position = case.write(1, 3, Resume(0, position))
    position = case.write(4, 5, Resume(3, position), loss=1.0, more=2.0)
    case.write(6, 6, Resume(5, position))
    assert case.steps() == [1, 2, 3, 4, 5, 6]
    assert not caplog.records


def test_a_file_in_which_nothing_changes_is_not_replaced(case: Case) -> None:
    """Else those who follow it as it grows would lose it."""
    position = case.write(1, 3)
    file = case.path.stat().st_ino
    case.write(4, 5, Resume(3, position))
    assert case.path.stat().st_ino == file
    assert case.steps() == [1, 2, 3, 4, 5]
    assert [each.name for each in case.path.parent.iterdir()] == [case.path.name]


def test_a_directory_that_cannot_be_made_is_an_error_of_open(case: Case) -> None:
    case.path.parent.parent.write_bytes(b"a file")
    with pytest.raises(OSError, match="logs"):
        case.open()
    case.path.parent.parent.unlink()
    case.write(1, 1)
    assert case.steps() == [1]


def test_a_directory_in_the_place_of_the_file_is_left_alone(case: Case) -> None:
    case.path.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        case.open()
    assert case.path.is_dir()


class AlmostFull:
    """A file on a disk that takes a few more bytes."""

    def __init__(self, file: Any) -> None:
        self._file, self._num_writes = file, 0
        self.truncate, self.seek = file.truncate, file.seek

    def write(self, data: Any) -> int:
        self._num_writes += 1
        if self._num_writes == 2:
            raise OSError("no space left")
        return int(self._file.write(data[:7]))


def test_a_full_disk_loses_the_points_that_it_meets_and_no_line_is_torn(case: Case) -> None:
    case.write(1, 2)
    sink: Any = case.open(Resume(2, None))
    sink.write(points(3, 3)[0])
    good, sink._file = sink._file, AlmostFull(sink._file)
    with pytest.raises(OSError, match="no space left"):
        sink.flush()
    sink._file = good
    sink.write(points(4, 4)[0])
    sink.flush()
    sink.close()
    assert case.steps() == [1, 2, 4]


@pytest.mark.parametrize("bad", [3, None, b"metrics"])
def test_a_path_that_is_none_is_refused(case: Case, bad: Any) -> None:
    with pytest.raises(TypeError, match="give the path of a file"):
        case.new(bad)


def test_the_path_is_that_of_the_working_directory_at_first(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = case.new(Path(case.path.name))
    monkeypatch.chdir("/")
    assert repr(sink).endswith(f"Sink({str(tmp_path / case.path.name)!r})")


def test_two_sinks_of_one_process_do_not_write_to_one_file(case: Case) -> None:
    first = case.open()
    with pytest.raises(OSError, match="written by another sink .* a file of its own"):
        case.open()
    first.close()
    case.write(1, 2)
    blocked = case.path / "not a directory" / case.path.name
    broken = case.new(blocked)
    for _ in range(2):  # the first attempt keeps no hold on the file
        with pytest.raises(NotADirectoryError):
            broken.open(NEW)
        with pytest.raises(NotADirectoryError):
            case.new(blocked).open(NEW)
