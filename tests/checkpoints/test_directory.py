"""Saving, choosing, replacing, rejecting, deleting; what writers and arguments must not be."""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks._errors import CheckpointError, DamagedCheckpointError, MetricError
from asynchooks.checkpoints import Checkpoint, CheckpointDirectory, Mode, Retention
from asynchooks.checkpoints._manifest import read_manifest

from .stores import (
    REPOSITORY,
    mount_namespace,
    names_in,
    newest_step,
    opened,
    rewrite,
    run,
    save,
    steps_in,
    writer,
)


def test_a_saved_checkpoint_is_there_with_all_that_was_given(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b") as directory:
        given = []

        def write(prefix: str) -> None:
            given.append(prefix)
            writer(b"1234")(prefix)

        saved = directory.save(7, write, seconds=1.5, metric=-0.25, extra={"hooks.json": b"{}"})
        assert directory.newest_intact() == saved
        assert directory.read_extra(saved, "hooks.json") == b"{}"
        assert directory.read_extra(saved, "other.json") is None
    path = tmp_path / "a" / "b" / "model.ckpt-7"
    assert saved == Checkpoint(str(path), str(path / path.name), 7, 1, 1.5, -0.25, 4 + 13 + 0 + 2)
    assert sorted(os.listdir(path)) == [
        "hooks.json",
        "manifest.json",
        "model.ckpt-7",
        "model.ckpt-7.index",
        "model.ckpt-7.parts",
    ]
    assert Path(saved.prefix).read_bytes() == b"1234"
    assert Path(given[0]).parent.name == ".new-model.ckpt-7-1"
    assert names_in(path.parent) == ["model.ckpt-7"]
    with pytest.raises(FrozenInstanceError):
        saved.step = 8  # type: ignore[misc]


def test_a_directory_at_the_prefix_is_a_checkpoint_too(tmp_path: Path) -> None:
    def write(prefix: str) -> None:
        os.makedirs(f"{prefix}/ä/assets")
        Path(f"{prefix}/ä/variables").write_bytes(b"v")

    with opened(tmp_path) as directory:
        saved = directory.save(1, write)
        assert directory.newest_intact() == saved
    assert saved.num_bytes == 1
    assert list(read_manifest(saved.path).files) == ["model.ckpt-1/ä/variables"]


@pytest.mark.parametrize(
    "address",
    ["s3://bucket/run", "gs://bucket", "memory:///", Path("gs://bucket/run"), Path("s3://bucket")],
)
def test_the_address_of_an_object_store_is_refused(address: str | Path) -> None:
    match = "give the path of a local directory, or the address of an object store"
    with pytest.raises(ValueError, match=match):
        CheckpointDirectory(address)


@pytest.mark.parametrize("address", ["file:///runs/a", "FILE:/runs/a", Path("file:///runs/a")])
def test_the_address_of_a_file_is_refused_and_the_path_is_asked_for(address: str | Path) -> None:
    with pytest.raises(ValueError, match="is '(?i:file):.*', an address; give the path alone"):
        CheckpointDirectory(address)


@pytest.mark.parametrize("path", ["C:/runs", "a:b", "runs/gs://bucket"])
def test_other_paths_with_a_colon_are_local(path: str) -> None:
    CheckpointDirectory(path)
    CheckpointDirectory(Path(path))


def test_a_step_saved_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5, 6)
    with opened(tmp_path) as directory:
        saved = directory.save(5, writer(b"again"))
        assert directory.newest_intact() == saved
    assert saved.serial == 3
    assert Path(saved.prefix).read_bytes() == b"again"
    assert names_in(tmp_path) == ["model.ckpt-5", "model.ckpt-6"]


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


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    "error", [SaverError("w"), KeyboardInterrupt(), SystemExit(3), MemoryError()], ids=repr
)
def test_an_error_of_the_writer_leaves_as_itself_with_a_note_and_changes_nothing(
    tmp_path: Path, step: int, error: BaseException
) -> None:
    (before,) = save(tmp_path, 1)

    def write(prefix: str) -> None:
        writer()(prefix)
        raise error

    with opened(tmp_path, retention=Retention(max_to_keep=1)) as directory:
        with pytest.raises(type(error)) as caught:
            directory.save(step, write)
        assert caught.value is error
        assert directory.newest_intact() == before
        assert names_in(tmp_path) == ["model.ckpt-1"]
        directory.save(2, writer())
    assert error.__notes__[-1:] == [
        f"raised while the checkpoint of step {step} was written in {tmp_path}; it is not saved, "
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


@given(st.floats(allow_nan=False), st.floats(min_value=0, allow_infinity=False))
def test_numbers_survive_exactly(metric: float, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as path:
        (saved,) = save(Path(path), 1, metric=metric, seconds=seconds)
        (found,) = CheckpointDirectory(path).checkpoints()
    assert found == saved
    assert found.metric is not None
    assert (found.metric.hex(), found.seconds.hex()) == (metric.hex(), seconds.hex())


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        saved = directory.save(
            np.int64(3), writer(), seconds=np.float32(0.5), metric=np.float32(0.1)
        )
    assert [type(each) for each in (saved.step, saved.seconds, saved.metric)] == [int, float, float]
    assert saved.metric == float(np.float32(0.1))


def test_a_metric_that_is_found_later_is_kept_with_the_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path, retention=Retention(keep_best=1, mode="min")) as directory:
        saved = directory.save(3, writer())
        directory.save(4, writer(), metric=2.0)
        assert not directory.set_metric(5, 0.5)
        assert directory.set_metric(3, 1)
        best = directory.best()
        assert best is not None
        assert (best.step, best.metric, best.serial) == (3, 1.0, saved.serial)
        assert names_in(tmp_path) == ["model.ckpt-3", "model.ckpt-4"]
        with pytest.raises(MetricError, match="NaN"):
            directory.set_metric(3, float("nan"))


def test_a_kill_while_a_metric_is_written_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as directory:
        directory.save(3, writer())
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", _killed)
            with pytest.raises(KeyboardInterrupt):
                directory.set_metric(3, 1.0)
    with opened(tmp_path) as directory:
        found = directory.newest_intact()
        assert found is not None
        assert (found.step, found.metric) == (3, None)
        assert directory.set_metric(3, 2.0)
        again = directory.newest_intact()
        assert again is not None
        assert (again.step, again.metric) == (3, 2.0)


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("mode", list(Mode))
def test_what_is_better_would_be_among_the_best_and_equals_none(tmp_path: Path, mode: Mode) -> None:
    sign = 1.0 if mode is Mode.MIN else -1.0
    with opened(tmp_path, retention=Retention(keep_best=2, mode=mode)) as directory:
        assert directory.is_better(sign * 9)
        directory.save(1, writer(), metric=sign * 3)
        assert directory.is_better(sign * 9)
        directory.save(2, writer(), metric=sign * 5)
        found = [directory.is_better(sign * each) for each in (2, 3, 4, 5, 6)]
        assert found == [True, True, True, False, False]
    with opened(tmp_path, retention=Retention()) as directory:
        assert not directory.is_better(-9)


def test_other_names_are_left_alone_and_do_not_count(tmp_path: Path) -> None:
    others = ["other-5", "model.ckpt-05", "model.ckpt-", "model.ckpt-x", "model.ckpt-5-6", ".new-a"]
    others += ["model.ckpt--1", "xmodel.ckpt-5", "model_ckpt-5", "model.ckpt-٣", ".old-other-1-0"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "model.ckpt-5.index").touch()
    assert CheckpointDirectory(tmp_path).newest_intact() is None
    save(tmp_path, 1)
    assert names_in(tmp_path) == sorted([*others, "model.ckpt-5.index", "model.ckpt-1"])
    assert steps_in(tmp_path) == [1]


def test_basenames_share_a_directory(tmp_path: Path) -> None:
    for basename in ("a", "a-1", "a+"):
        with opened(tmp_path, basename, Retention(max_to_keep=1)) as directory:
            directory.save(1, writer())
            directory.save(2, writer())
            assert [each.serial for each in directory.checkpoints()] == [2]
    assert names_in(tmp_path) == ["a+-2", "a-1-2", "a-2"]


def test_a_rejected_one_is_kept_and_never_chosen_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, newest = save(tmp_path, 1, 2)
    with opened(tmp_path, retention=Retention(max_to_keep=1)) as directory:
        with caplog.at_level(logging.WARNING):
            directory.reject(newest, "the loss is NaN")
        assert caplog.messages == [
            f"{newest.path} is rejected and kept as {newest.path}.rejected-2: the loss is NaN"
        ]
        assert newest_step(tmp_path) == 1
        with pytest.raises(ValueError, match="any more; give one that"):
            directory.reject(newest, "twice")
        assert directory.save(2, writer()).serial == 3
    with opened(tmp_path) as directory:
        directory.reject(directory.checkpoints()[0], "this one too")
        assert directory.newest_intact() is None
    rejected = ["model.ckpt-2.rejected-2", "model.ckpt-2.rejected-3"]
    assert names_in(tmp_path) == rejected
    (tmp_path / rejected[1] / "manifest.json").write_bytes(b"")
    assert save(tmp_path, 1)[0].serial == 4


def test_only_what_is_there_can_be_rejected(tmp_path: Path) -> None:
    (old,) = save(tmp_path / "here", 1)
    (other,) = save(tmp_path / "there", 1)
    with opened(tmp_path / "here") as directory:
        directory.save(1, writer())
        for wrong in (old, other):
            with pytest.raises(ValueError, match="is not in .*here any more; give one that"):
                directory.reject(wrong, "")
    assert names_in(tmp_path / "here") == ["model.ckpt-1"]


def test_what_changes_the_disk_needs_open(tmp_path: Path) -> None:
    (saved,) = save(tmp_path, 1)
    directory = CheckpointDirectory(tmp_path)
    with pytest.raises(RuntimeError, match=r"right: directory.open\(\), then directory.save"):
        directory.save(1, writer())
    with pytest.raises(RuntimeError, match=r"is not open\n  wrong: directory.reject"):
        directory.reject(saved, "")
    with pytest.raises(RuntimeError, match=r"is not open\n  wrong: directory.set_metric"):
        directory.set_metric(1, 1.0)


def test_a_relative_path_does_not_follow_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = CheckpointDirectory("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    directory.open()
    directory.close()
    assert os.listdir(tmp_path / "here") == ["lock"]


SAVE_MANY = """
import sys
from pathlib import Path
from asynchooks.checkpoints import CheckpointDirectory, Retention
directory = CheckpointDirectory(sys.argv[1], retention=Retention(max_to_keep=1))
directory.open()
for step in range(2, 80):
    directory.save(step, lambda prefix: Path(prefix).write_bytes(bytes(100_000)))
directory.close()
"""


@pytest.mark.faults
def test_a_reader_finds_one_at_any_time_while_a_run_saves_and_deletes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    run = subprocess.Popen([sys.executable, "-c", SAVE_MANY, str(tmp_path)], cwd=REPOSITORY)
    found = [1]
    with run:
        while run.poll() is None:
            found.append(newest_step(tmp_path))
    assert run.returncode == 0
    assert newest_step(tmp_path) == 79
    assert found == sorted(found)
    assert len(set(found)) > 5
    assert caplog.messages == []


def test_the_order_is_that_of_saving_and_not_that_of_steps(tmp_path: Path) -> None:
    saved = save(tmp_path, 9, 10, 3)
    saved += save(tmp_path, 4)
    assert [each.serial for each in saved] == [1, 2, 3, 4]
    assert steps_in(tmp_path) == [9, 10, 3, 4]
    assert newest_step(tmp_path) == 4


def test_up_to_step_looks_at_no_later_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 5, 9, 7)
    (tmp_path / "model.ckpt-9" / "manifest.json").write_bytes(b"")
    directory = CheckpointDirectory(tmp_path)
    with caplog.at_level(logging.WARNING):
        chosen = [directory.newest_intact(up_to_step=step) for step in (4, 5, 6, 7, 8)]
    assert caplog.messages == [], "it is not read at all"
    assert [each and each.step for each in chosen] == [None, 5, 5, 7, 7]
    with pytest.raises(ValueError, match="step is -1; give an integer >= 0"):
        directory.newest_intact(up_to_step=-1)


def test_a_copy_from_another_directory_with_the_same_serial_is_told_apart(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    save(here, 1)
    save(there, 2)
    shutil.copytree(there / "model.ckpt-2", here / "model.ckpt-2")
    with opened(here, retention=Retention(max_to_keep=1)) as directory:
        assert [each.step for each in directory.checkpoints()] == [1, 2]
        directory.save(3, writer())
    assert names_in(here) == ["model.ckpt-3"]


def test_the_best_is_the_intact_one_with_the_best_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step, metric in [(1, 0.5), (2, 0.1), (3, 0.5), (4, 0.9), (5, None)]:
        save(tmp_path, step, metric=metric)
    lowest = CheckpointDirectory(tmp_path, retention=Retention(mode="min"))
    highest = CheckpointDirectory(tmp_path, retention=Retention(mode=Mode.MAX))
    assert getattr(lowest.best(), "step", None) == 2
    assert getattr(highest.best(), "step", None) == 4
    os.truncate(tmp_path / "model.ckpt-2/model.ckpt-2", 0)
    with caplog.at_level(logging.WARNING):
        assert getattr(lowest.best(), "step", None) == 1
    assert ["model.ckpt-2 is truncated" in each for each in caplog.messages] == [True]
    for step in (1, 3, 4):
        os.truncate(tmp_path / f"model.ckpt-{step}/model.ckpt-{step}", 0)
    with pytest.raises(DamagedCheckpointError, match="no intact checkpoint with a metric"):
        lowest.best()


def test_there_is_no_best_without_metrics(tmp_path: Path) -> None:
    assert CheckpointDirectory(tmp_path).best() is None
    save(tmp_path, 1, 2)
    assert CheckpointDirectory(tmp_path).best() is None
    (tmp_path / "model.ckpt-2/manifest.json").unlink()
    assert CheckpointDirectory(tmp_path).best() is None
    (tmp_path / "model.ckpt-1/manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError, match="no intact checkpoint with a metric"):
        CheckpointDirectory(tmp_path).best()


def test_nothing_is_there_where_nothing_was_saved(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        directory = CheckpointDirectory(path)
        assert directory.newest_intact() is None
        assert directory.checkpoints() == []
    assert os.listdir(tmp_path) == []


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
    assert directory.best() is None
    assert everything() == before


@pytest.mark.faults
def test_what_cannot_be_removed_hides_no_error_and_fails_no_save(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    code = """
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    directory = CheckpointDirectory(path, retention=Retention(max_to_keep=1))
    directory.open()
    def pin(place):  # what is mounted cannot be removed
        subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    pin(path / "model.ckpt-1/model.ckpt-1.parts")
    (path / "model.ckpt-1/model.ckpt-1.parts/empty").touch()
    report(directory.save, 3, write)
    def fail(prefix):
        Path(prefix).mkdir()
        pin(prefix)
        raise OSError("the writer's own")
    report(directory.save, 4, fail)
    report(directory.save, 4, write)
    print(sorted(os.listdir(path)), directory.newest_intact().step)
    """
    lines = run(code, tmp_path, mount_namespace())
    assert ".new-model.ckpt-1-0 could not be removed: [Errno 16]" in lines[0]
    assert lines[1] == "done"
    assert ".new-model.ckpt-4-4 could not be removed: [Errno 16]" in lines[2]
    assert "the writer's own; older checkpoints are untouched" in lines[3]
    assert lines[4:] == [
        "done",
        "['.new-model.ckpt-1-0', '.new-model.ckpt-4-4', 'lock', 'model.ckpt-4'] 4",
    ]
    # in this process nothing is mounted there
    with opened(tmp_path, retention=Retention(max_to_keep=1)) as directory:
        assert names_in(tmp_path) == ["model.ckpt-4"]
        assert directory.save(5, writer()).serial == 6


@pytest.mark.faults
def test_a_rename_that_fails_puts_the_one_of_the_same_step_back(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    code = """
    directory = CheckpointDirectory(path)
    directory.open()
    def write_in_mount(prefix):  # a mount cannot be renamed
        subprocess.run(["mount", "-t", "tmpfs", "none", os.path.dirname(prefix)], check=True)
        write(prefix)
    report(directory.save, 2, write_in_mount)
    print([(each.step, each.serial) for each in directory.checkpoints()])
    print(directory.newest_intact().serial)
    """
    lines = run(code, tmp_path, mount_namespace())
    assert "step 2 is not saved: [Errno 16]" in lines[0]
    assert lines[1:] == ["[(1, 1), (2, 2)]", "2"]
    with opened(tmp_path):
        assert names_in(tmp_path) == ["model.ckpt-1", "model.ckpt-2"]


def test_a_failure_to_delete_older_ones_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    with opened(tmp_path, retention=Retention(max_to_keep=1)) as directory:
        # of a newer version, written after open: it forbids to decide what goes
        manifest = tmp_path / "model.ckpt-1" / "manifest.json"
        rewrite(manifest, version=2)
        with caplog.at_level(logging.WARNING):
            directory.save(2, writer())
    assert "are not deleted: " in caplog.text
    assert names_in(tmp_path) == ["model.ckpt-1", "model.ckpt-2"]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"step": -1}, ValueError, "step is -1; give an integer >= 0"),
        ({"step": 1.0}, TypeError, "step is 1.0; give an integer"),
        ({"seconds": -1}, ValueError, "seconds is -1; give the seconds of training"),
        ({"seconds": math.inf}, ValueError, "seconds is inf"),
        ({"seconds": math.nan}, ValueError, "seconds is nan"),
        ({"seconds": "1"}, TypeError, "seconds is '1'; give the seconds"),
        ({"metric": math.nan}, MetricError, "metric is NaN"),
        ({"metric": "1"}, TypeError, "metric is '1'; give a number"),
        ({"extra": {"a/b": b""}}, ValueError, "'a/b' is no name of an extra file"),
        ({"extra": {"..": b""}}, ValueError, "is no name of an extra file"),
        ({"extra": {"": b""}}, ValueError, "is no name of an extra file"),
        ({"extra": {5: b""}}, TypeError, "the name of an extra file is 5"),
        ({"extra": {"a": "b"}}, TypeError, "the extra file 'a' is 'b'; give bytes"),
        ({"extra": {"manifest.json": b""}}, ValueError, "'manifest.json' is taken"),
        ({"extra": {"model.ckpt-1.x": b""}}, ValueError, "'model.ckpt-1.x' is taken"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with opened(tmp_path) as directory:
        with pytest.raises(error, match=match):
            directory.save(options.pop("step", 1), pytest.fail, **options)
        assert names_in(tmp_path) == []
        assert directory.save(1, writer()).serial == 1


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        *(
            ({"basename": each}, ValueError, "give a name without separators")
            for each in ("", ".a", "a/b", "a\\b", "a\0")
        ),
        ({"basename": 5}, TypeError, "basename is 5"),
        ({"retention": 5}, TypeError, r"retention is 5; give a Retention\(max_to_keep=...\)"),
    ],
)
def test_what_names_no_directory_of_checkpoints_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        CheckpointDirectory(tmp_path, **options)
