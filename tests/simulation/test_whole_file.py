"""A file appears whole or not at all, and a path is refused before any work is done for it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from asynchooks.simulation.output._whole_file import check_writable, whole_file


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with whole_file(path) as new:
        new.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_after_an_error_nothing_is_left_and_the_old_file_is_there(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(type(error)):
        with whole_file(path) as new:
            new.write_text("half")
            raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_an_error_before_the_first_byte_leaves_as_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^early$"):
        with whole_file(tmp_path / "out.json"):
            raise ValueError("early")
    assert os.listdir(tmp_path) == []


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    with whole_file(link) as new:
        new.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain", tmp_path / "out"
    plain.touch()
    with whole_file(path) as new:
        new.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_writable_path_passes_and_is_left_alone(tmp_path: Path) -> None:
    check_writable(tmp_path / "out.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        ("missing/out", FileNotFoundError, "there is no directory '.*missing'; make it"),
        ("", IsADirectoryError, "it is a directory; name a file"),
        ("/dev/null", FileExistsError, "no regular file"),
        ("x" * 300, OSError, "cannot be written.*name another file"),
    ],
    ids=["directory is missing", "directory", "device", "name too long"],
)
def test_what_cannot_be_written_is_refused_with_the_reason(
    tmp_path: Path, path: str, error: type[OSError], match: str
) -> None:
    with pytest.raises(error, match=match):
        check_writable(tmp_path / path)
    with pytest.raises(error, match=match):
        with whole_file(tmp_path / path) as new:
            new.write_text("new")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc")
def test_a_directory_that_takes_no_file_is_not_called_missing() -> None:
    with pytest.raises(OSError, match=r"cannot be written \(.*\); name another file"):
        check_writable("/proc/out.json")
