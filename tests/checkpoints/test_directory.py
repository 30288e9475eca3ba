"""Saving in a directory: names, the order on the disk, what writers must not do, and leftovers."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import CheckpointError
from asynchooks.checkpoints import Checkpoint, CheckpointDirectory, Retention

from .stores import (
    mount_namespace,
    names_in,
    opened,
    run,
    save,
    steps_in,
    writer,
)


def test_a_checkpoint_is_a_directory_with_what_was_written_the_extra_files_and_a_manifest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a" / "b"
    with opened(path) as directory:
        given = []

        def write(prefix: str) -> None:
            given.append(prefix)
            os.makedirs(f"{prefix}/ä/assets")  # a directory at the prefix will do
            Path(prefix, "ä", "variables").write_bytes(b"1234")

        saved = directory.save(7, write, seconds=1.5, metric=-0.25, extra={"hooks.json": b"{}"})
        assert directory.newest_intact() == saved
    at = path / "model.ckpt-7"
    assert saved == Checkpoint(str(at), str(at / at.name), 7, 1, 1.5, -0.25, 4 + 2)
    assert sorted(os.listdir(at)) == ["hooks.json", "manifest.json", "model.ckpt-7"]
    assert Path(given[0]).parent.name == ".new-model.ckpt-7-1"
    assert names_in(path) == ["model.ckpt-7"]


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        *((each, "give the path of a local directory, or") for each in ("s3://b/r", "gs://bucket")),
        *((each, "give the path alone") for each in ("file:///runs/a", "FILE:/runs/a")),
    ],
)
def test_an_address_is_refused_and_other_paths_with_a_colon_are_local(
    address: str, advice: str
) -> None:
    for each in (address, Path(address)):
        with pytest.raises(ValueError, match=f"an address; {advice}"):
            CheckpointDirectory(each)
    for local in ("C:/runs", "a:b", "runs/gs://bucket"):
        CheckpointDirectory(local)


def test_everything_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def logged(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *targets: str, **options: Any) -> None:
            of = f"/proc/self/fd/{path}" if what == "sync" else path
            of = os.readlink(of) if what == "sync" else of
            names = [os.path.relpath(each, tmp_path) for each in (of, *targets)]
            log.append(f"{what} {' to '.join(names)}")
            real(path, *targets, **options)

        return call

    with opened(tmp_path / "a" / "b", retention=Retention(max_to_keep=1)) as directory:
        directory.save(1, writer())
        directory.save(2, writer())
        monkeypatch.setattr(os, "fsync", logged("sync", os.fsync))
        monkeypatch.setattr(os, "rename", logged("rename", os.rename))
        monkeypatch.setattr(shutil, "rmtree", logged("remove", shutil.rmtree))
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
    with opened(tmp_path / "c" / "d"):
        assert log == ["sync .", "sync c"]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda prefix: None, "no file is at the path"),
        (lambda prefix: os.makedirs(f"{prefix}/a/b"), "no file is at the path"),
        (lambda prefix: Path(f"{prefix}/../../elsewhere").resolve().touch(), "no file is at"),
        (
            lambda prefix: Path(prefix).with_name("checkpoint").touch(),
            "checkpoint does not begin with the path that it was given",
        ),
        (
            lambda prefix: os.symlink("/etc/hostname", f"{prefix}.link"),
            "model.ckpt-2.link is a symlink, which cannot be kept",
        ),
        (os.mkfifo, "model.ckpt-2 is a special file, which cannot be kept"),
    ],
)
def test_what_a_writer_must_not_write_is_refused(
    tmp_path: Path, write: Callable[[str], None], words: str
) -> None:
    save(tmp_path, 1)
    with opened(tmp_path) as directory, pytest.raises(CheckpointError, match=words):
        directory.save(2, write)
    assert [each for each in names_in(tmp_path) if each != "elsewhere"] == ["model.ckpt-1"]


@pytest.mark.parametrize("is_link", [True, False])
def test_what_no_checkpoint_may_replace_is_reported_before_writing(
    tmp_path: Path, is_link: bool
) -> None:
    foreign = tmp_path / "model.ckpt-1"
    foreign.symlink_to(tmp_path) if is_link else foreign.touch()
    with opened(tmp_path) as directory:
        with pytest.raises(CheckpointError, match="model.ckpt-1 is no directory.*move it away"):
            directory.save(1, pytest.fail)
    assert names_in(tmp_path) == ["model.ckpt-1"]


@pytest.mark.parametrize(
    ("is_made_again", "words"),
    [(False, "No such file.*gone and is not recreated"), (True, "not the file that open.. locked")],
)
def test_a_directory_that_vanished_is_not_recreated(
    is_made_again: bool, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    with opened(path) as directory:

        def write(prefix: str) -> None:
            shutil.rmtree(path)
            if is_made_again:
                os.makedirs(os.path.dirname(prefix))
            Path(prefix).touch()

        with pytest.raises(CheckpointError, match=words):
            directory.save(1, write)
        with pytest.raises(CheckpointError, match="was removed, moved or replaced"):
            directory.save(2, pytest.fail)
    assert not path.exists() or names_in(path) == []


def test_a_kill_while_a_metric_is_written_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    (saved,) = save(tmp_path, 3)
    with opened(tmp_path) as directory:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "rename", kill)
            directory.set_metric(3, 1.0)
    with opened(tmp_path) as directory:
        assert directory.newest_intact() == saved
        assert directory.set_metric(3, 2.0)
        assert [each.metric for each in directory.checkpoints()] == [2.0]


def test_other_names_are_left_alone_and_do_not_count(tmp_path: Path) -> None:
    others = ["other-5", "model.ckpt-05", "model.ckpt-", "model.ckpt-x", "model.ckpt-5-6", ".new-a"]
    others += ["model.ckpt--1", "xmodel.ckpt-5", "model_ckpt-5", "model.ckpt-٣", ".old-other-1-0"]
    others += [".new-other-1-1"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "model.ckpt-5.index").touch()
    assert CheckpointDirectory(tmp_path).newest_intact() is None
    save(tmp_path, 1)
    assert names_in(tmp_path) == sorted([*others, "model.ckpt-5.index", "model.ckpt-1"])
    assert steps_in(tmp_path) == [1]


def test_reading_changes_nothing_and_needs_no_open(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, extra={"e": b"e"})
    os.truncate(tmp_path / "model.ckpt-2/model.ckpt-2", 1)
    (tmp_path / ".new-model.ckpt-3-3").mkdir()
    (tmp_path / ".old-model.ckpt-4-0").mkdir()
    (tmp_path / "lock").unlink()

    def everything() -> list[tuple[str, int]]:
        return sorted((str(each), each.lstat().st_mtime_ns) for each in tmp_path.rglob("*"))

    before = everything()
    directory = CheckpointDirectory(tmp_path)
    newest = directory.newest_intact()
    assert newest is not None
    assert directory.read_extra(newest, "e") == b"e"
    assert len(directory.checkpoints()) == 2
    assert CheckpointDirectory(tmp_path / "missing").newest_intact() is None
    assert everything() == before


@pytest.mark.faults
def test_what_cannot_be_removed_or_renamed_hides_no_error_and_fails_no_save(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    code = """
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    directory = CheckpointDirectory(path, retention=Retention(max_to_keep=1))
    directory.open()
    def pin(place):  # what is mounted can be neither removed nor renamed
        subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    pin(path / "model.ckpt-1/model.ckpt-1.parts")
    (path / "model.ckpt-1/model.ckpt-1.parts/empty").touch()
    report(directory.save, 3, write)
    def fail(prefix):
        Path(prefix).mkdir()
        pin(prefix)
        raise OSError("the writer's own")
    report(directory.save, 4, fail)
    def write_in_mount(prefix):
        pin(os.path.dirname(prefix))
        write(prefix)
    report(directory.save, 3, write_in_mount)
    print([(each.step, each.serial) for each in directory.checkpoints()])
    """
    lines = run(code, tmp_path, mount_namespace())
    assert ".new-model.ckpt-1-0 could not be removed: [Errno 16]" in lines[0]
    assert lines[1] == "done"
    assert ".new-model.ckpt-4-4 could not be removed: [Errno 16]" in lines[2]
    assert "the writer's own; older checkpoints are untouched" in lines[3]
    assert "step 3 is not saved: [Errno 16]" in lines[-2]
    assert lines[-1] == "[(3, 3)]", "it was put back"
    # in this process nothing is mounted there
    with opened(tmp_path, retention=Retention(max_to_keep=1)) as directory:
        assert names_in(tmp_path) == ["model.ckpt-3"]
        assert directory.save(5, writer()).serial == 6


# What a killed run leaves behind


@pytest.mark.parametrize(
    ("renamed", "there", "next_serial"),
    [
        ({"model.ckpt-2": ".new-model.ckpt-2-2"}, [1], 3),  # it was not published
        ({"model.ckpt-1": ".new-model.ckpt-1-0"}, [2], 3),  # it was being deleted, though whole
        ({"model.ckpt-1": ".old-model.ckpt-1-0"}, [1, 2], 3),  # it was not replaced
        ({"model.ckpt-2": "model.ckpt-2.rejected-2"}, [1], 3),
    ],
)
def test_what_a_killed_run_leaves_is_put_back_or_removed_and_its_serial_not_given_again(
    renamed: dict[str, str], there: list[int], next_serial: int, tmp_path: Path
) -> None:
    save(tmp_path, 1, 2)
    for old, new in renamed.items():
        (tmp_path / old).rename(tmp_path / new)
    with opened(tmp_path) as directory:
        assert steps_in(tmp_path) == there
        assert [each for each in names_in(tmp_path) if each.startswith(".")] == []
        assert directory.save(3, writer()).serial == next_serial


@pytest.mark.parametrize("leftover", [".new-model.ckpt-2-1", ".old-model.ckpt-2-0"])
@pytest.mark.parametrize("again", ["model.ckpt-2", ".old-model.ckpt-2-1"])
def test_what_was_saved_again_since_is_not_replaced_by_a_leftover(
    again: str, leftover: str, tmp_path: Path
) -> None:
    save(tmp_path, 2)
    (tmp_path / "model.ckpt-2").rename(tmp_path / "aside")
    save(tmp_path, 1)
    (saved,) = save(tmp_path, 2)
    (tmp_path / "aside").rename(tmp_path / leftover)
    (tmp_path / "model.ckpt-2").rename(tmp_path / again)
    with opened(tmp_path) as directory:
        assert directory.newest_intact() == saved
    assert names_in(tmp_path) == ["model.ckpt-1", "model.ckpt-2"]
