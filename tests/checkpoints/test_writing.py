"""A writer that breaks the rules is refused; what it wrote gets its final name last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks._errors import CheckpointError
from asynchooks.checkpoints import Retention

from .stores import names_in, opened, save, writer


def test_everything_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    real_fsync, real_rename, real_rmtree = os.fsync, os.rename, shutil.rmtree

    def name_of(path: str) -> str:
        return os.path.relpath(path, tmp_path)

    def fsync(descriptor: int) -> None:
        log.append(f"sync {name_of(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        real_fsync(descriptor)

    def rename(source: str, target: str) -> None:
        log.append(f"rename {name_of(source)} to {name_of(target)}")
        real_rename(source, target)

    def rmtree(path: str, **options: Any) -> None:
        log.append(f"remove {name_of(path)}")
        real_rmtree(path, **options)

    with opened(tmp_path / "a" / "b", retention=Retention(max_to_keep=1)) as directory:
        directory.save(1, writer())
        directory.save(2, writer())
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        directory.save(2, writer(), extra={"hooks.json": b""})
    new, final = "a/b/.new-model.ckpt-2-3", "a/b/model.ckpt-2"
    assert log == [
        f"sync {new}/hooks.json",
        f"sync {new}/model.ckpt-2",
        f"sync {new}/model.ckpt-2.index",
        f"sync {new}/model.ckpt-2.parts",
        f"sync {new}/model.ckpt-2.parts/empty",
        f"sync {new}",
        f"sync {new}/manifest.json.new",
        f"rename {new}/manifest.json.new to {new}/manifest.json",
        f"sync {new}",
        f"rename {final} to a/b/.old-model.ckpt-2-0",
        f"rename {new} to {final}",
        "sync a/b",
        "remove a/b/.old-model.ckpt-2-0",
    ]
    log.clear()
    with opened(tmp_path / "c" / "d") as directory:
        assert log == ["sync .", "sync c"]
        directory.save(1, writer())


class SaverError(Exception):
    pass


@pytest.mark.parametrize(
    "error", [SaverError("w"), KeyboardInterrupt(), SystemExit(3), MemoryError()]
)
def test_an_error_of_the_writer_leaves_as_itself_with_a_note(
    tmp_path: Path, error: BaseException
) -> None:
    save(tmp_path, 1)

    def write(prefix: str) -> None:
        writer()(prefix)
        raise error

    with opened(tmp_path) as directory:
        with pytest.raises(type(error)) as caught:
            directory.save(2, write)
        assert caught.value is error
        assert names_in(tmp_path) == ["model.ckpt-1"]
        directory.save(2, writer())
    assert error.__notes__ == [
        f"raised while the checkpoint of step 2 was written in {tmp_path}; it is not saved, "
        "older checkpoints are untouched"
    ]


def nothing(prefix: str) -> None:
    """Write nothing."""


def empty_directories(prefix: str) -> None:
    os.makedirs(f"{prefix}/a/b")


def elsewhere(prefix: str) -> None:
    Path(prefix).parents[1].joinpath("elsewhere").touch()


def beside(prefix: str) -> None:
    Path(prefix).touch()
    Path(prefix).with_name("checkpoint").touch()


def symlink(prefix: str) -> None:
    Path(prefix).mkdir()
    (Path(prefix) / "link").symlink_to("/etc/hostname")


def fifo(prefix: str) -> None:
    os.mkfifo(prefix)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (nothing, "no file is at the path that it was given"),
        (empty_directories, "no file is at the path that it was given"),
        (elsewhere, "no file is at the path that it was given"),
        (beside, "checkpoint does not begin with the path that it was given"),
        (symlink, "model.ckpt-2/link is a symlink, which cannot be kept"),
        (fifo, "model.ckpt-2 is a special file, which cannot be kept"),
    ],
)
def test_what_a_writer_must_not_write_is_refused(
    tmp_path: Path, write: Callable[[str], None], words: str
) -> None:
    save(tmp_path, 1)
    with opened(tmp_path) as directory:
        with pytest.raises(CheckpointError, match=words):
            directory.save(2, write)
    assert [each for each in names_in(tmp_path) if each != "elsewhere"] == ["model.ckpt-1"]


@pytest.mark.parametrize("is_link", [True, False])
def test_what_no_checkpoint_may_replace_is_reported_before_writing(
    tmp_path: Path, is_link: bool
) -> None:
    foreign = tmp_path / "model.ckpt-1"
    foreign.symlink_to(tmp_path) if is_link else foreign.write_bytes(b"foreign")
    with opened(tmp_path) as directory:
        with pytest.raises(CheckpointError, match="model.ckpt-1 is no directory.*move it away"):
            directory.save(1, pytest.fail)
    assert names_in(tmp_path) == ["model.ckpt-1"]


def test_a_directory_that_vanished_is_not_recreated(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with opened(path) as directory:

        def write(prefix: str) -> None:
            shutil.rmtree(path)
            Path(prefix).write_bytes(b"")

        words = "step 1 is not saved: .*No such file.*the directory is gone and is not recreated"
        with pytest.raises(CheckpointError, match=words):
            directory.save(1, write)
        with pytest.raises(CheckpointError, match="was removed, moved or replaced"):
            directory.save(2, pytest.fail)
    assert not path.exists()


def test_a_writer_that_recreates_the_lost_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with opened(path) as directory:

        def write(prefix: str) -> None:
            shutil.rmtree(path)
            os.makedirs(os.path.dirname(prefix))
            Path(prefix).touch()

        with pytest.raises(CheckpointError, match="is not the file that open.. locked"):
            directory.save(1, write)
    assert names_in(path) == []
