"""Which checkpoint is chosen: by serial or by metric, up to a step, and while others save."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asynchooks._errors import DamagedCheckpointError
from asynchooks.checkpoints import CheckpointDirectory, Mode, Retention

from .stores import REPOSITORY, newest_step, save, steps_in

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


def test_up_to_step_looks_at_no_later_step(tmp_path: Path) -> None:
    save(tmp_path, 5, 9, 7)
    (tmp_path / "model.ckpt-9" / "manifest.json").unlink()
    directory = CheckpointDirectory(tmp_path)
    chosen = [directory.newest_intact(up_to_step=step) for step in (4, 5, 6, 7, 8)]
    assert [each and each.step for each in chosen] == [None, 5, 5, 7, 7]
    with pytest.raises(ValueError, match="step is -1; give an integer >= 0"):
        directory.newest_intact(up_to_step=-1)


def test_steps_beyond_up_to_step_are_not_read_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 5, 9)
    (tmp_path / "model.ckpt-9" / "manifest.json").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        CheckpointDirectory(tmp_path).newest_intact(up_to_step=8)
    assert caplog.messages == []


def test_the_best_is_the_intact_one_with_the_best_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step, metric in [(1, 0.5), (2, 0.1), (3, 0.5), (4, 0.9), (5, None)]:
        save(tmp_path, step, metric=metric)
    lowest = CheckpointDirectory(tmp_path)
    highest = CheckpointDirectory(tmp_path, retention=Retention(mode=Mode.MAX))
    assert getattr(lowest.best(), "step", None) == 2
    assert getattr(highest.best(), "step", None) == 4
    os.truncate(tmp_path / "model.ckpt-2/model.ckpt-2", 0)
    with caplog.at_level(logging.WARNING):
        assert getattr(lowest.best(), "step", None) == 3
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
