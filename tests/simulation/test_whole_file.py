"""A file appears whole or not at all, and a path is refused before any work is done for it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from asynchooks.simulation.output._whole_file import check_writable, whole_file


def test_after_an_interrupt_nothing_is_left_and_the_old_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as new:
        new.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


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
    check_writable(path)
    assert not path.exists()
    with whole_file(path) as new:
        new.touch()
        assert not path.exists()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["out", "plain"]


@pytest.mark.parametrize(
    ("path", "error", "match"),
    [
        ("", IsADirectoryError, "it is a directory; name a file"),
        ("/dev/null", FileExistsError, "no regular file"),
        ("x" * 300, OSError, "cannot be written.*name another file"),
    ],
    ids=["directory", "device", "name too long"],
)
def test_what_cannot_be_written_is_refused_with_the_reason(
    tmp_path: Path, path: str, error: type[OSError], match: str
) -> None:
    with pytest.raises(error, match=match):
        check_writable(tmp_path / path)
    with pytest.raises(error, match=match), whole_file(tmp_path / path) as new:
        new.write_text("new")
