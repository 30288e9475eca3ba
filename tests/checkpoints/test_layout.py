"""What a killed run leaves behind is put back, or removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .stores import names_in, opened, save, steps_in, writer


def leave_written(path: Path, step: int, serial: int) -> Path:
    """Leave a complete checkpoint as a crash before its last rename does."""
    target = path / f".new-model.ckpt-{step}-{serial}"
    (path / f"model.ckpt-{step}").rename(target)
    return target


def test_what_was_not_published_is_removed_and_its_serial_not_given_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    leave_written(tmp_path, 2, 2)
    with opened(tmp_path) as directory:
        assert names_in(tmp_path) == ["model.ckpt-1"]
        assert directory.save(3, writer()).serial == 3


@pytest.mark.parametrize("name", ["model.ckpt-2", ".old-model.ckpt-2-0"])
def test_what_was_saved_again_since_is_not_replaced_by_a_leftover(
    tmp_path: Path, name: str
) -> None:
    save(tmp_path, 2)
    leftover = leave_written(tmp_path, 2, 1)
    leftover.rename(tmp_path / "aside")
    save(tmp_path, 1)
    again = save(tmp_path, 2)[0]
    (tmp_path / "aside").rename(leftover)
    if name != "model.ckpt-2":
        (tmp_path / "model.ckpt-2").rename(tmp_path / name)
    with opened(tmp_path) as directory:
        assert directory.newest_intact() == again
    assert names_in(tmp_path) == ["model.ckpt-1", "model.ckpt-2"]


def test_what_could_not_be_removed_is_in_the_way_of_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.save(1, writer())
        (tmp_path / ".old-model.ckpt-1-0").mkdir()
        (tmp_path / ".old-model.ckpt-1-0" / "file").touch()
        directory.save(1, writer())
        assert names_in(tmp_path) == [".old-model.ckpt-1-0", "model.ckpt-1"]


def test_what_was_not_replaced_is_put_back(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "model.ckpt-1").rename(tmp_path / ".old-model.ckpt-1-0")
    save(tmp_path, 2)
    assert steps_in(tmp_path) == [1, 2]


def test_what_was_being_deleted_is_removed_though_it_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "model.ckpt-1").rename(tmp_path / ".new-model.ckpt-1-0")
    save(tmp_path, 3)
    assert names_in(tmp_path) == ["model.ckpt-2", "model.ckpt-3"]


def test_of_several_that_were_not_replaced_the_newest_is_put_back(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "model.ckpt-1").rename(tmp_path / "aside")
    save(tmp_path, 2, 1)
    (tmp_path / "model.ckpt-1").rename(tmp_path / ".old-model.ckpt-1-1")
    (tmp_path / "aside").rename(tmp_path / ".old-model.ckpt-1-0")
    with opened(tmp_path) as directory:
        assert [each.serial for each in directory.checkpoints()] == [1, 2]
    assert names_in(tmp_path) == ["model.ckpt-1", "model.ckpt-2"]


def test_leftovers_of_another_basename_are_left_to_it(tmp_path: Path) -> None:
    (tmp_path / ".new-other-1-1").mkdir()
    save(tmp_path, 1)
    assert names_in(tmp_path) == [".new-other-1-1", "model.ckpt-1"]
