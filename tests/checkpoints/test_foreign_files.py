"""Files that other programs leave in checkpoints: file browsers, notebooks, network disks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    DamagedCheckpointError,
    FunctionSessionCreator,
    MonitoredSession,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory, CheckpointStore, Retention

from .stores import writer


def a_file(checkpoint: Path) -> None:
    (checkpoint / ".DS_Store").write_bytes(b"icons")


def a_file_without_a_dot(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("the best one so far")


def a_directory(checkpoint: Path) -> None:
    (checkpoint / ".ipynb_checkpoints").mkdir()
    (checkpoint / ".ipynb_checkpoints" / "hooks-checkpoint.json").write_text("{}")


def a_file_beside_the_savers(checkpoint: Path) -> None:
    (parts,) = checkpoint.glob("*.parts")
    (parts / ".nfs0000000004c2").touch()


def a_link(checkpoint: Path) -> None:
    (checkpoint / "latest").symlink_to("nowhere")


FOREIGN = [a_file, a_file_without_a_dot, a_directory, a_file_beside_the_savers, a_link]


@pytest.mark.parametrize("leave", FOREIGN)
def test_what_other_programs_leave_in_a_checkpoint_does_not_count(
    tmp_path: Path, leave: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(tmp_path, retention=Retention(max_to_keep=2))
    directory.open()
    with caplog.at_level(logging.WARNING, "asynchooks"):
        for step in (1, 2):
            leave(Path(directory.save(step, writer()).path))
        newest = directory.newest_intact()
        assert newest is not None
        assert newest.step == 2
        directory.save(3, writer())
        assert [each.step for each in directory.checkpoints()] == [2, 3]
        assert sorted(each.name for each in tmp_path.glob("*1*")) == []
        directory.reject(directory.checkpoints()[0], "it diverged")
    directory.close()
    assert [each.step for each in directory.checkpoints()] == [3]
    assert caplog.text.count("\n") == 1
    assert "it diverged" in caplog.text


@pytest.mark.parametrize("leave", FOREIGN)
def test_a_file_that_is_missing_is_still_damage_beside_what_others_leave(
    tmp_path: Path, leave: Callable[[Path], None]
) -> None:
    directory = CheckpointDirectory(tmp_path)
    directory.open()
    newest = Path(directory.save(1, writer()).path)
    directory.close()
    leave(newest)
    (newest / "model.ckpt-1.index").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"model\.ckpt-1\.index is missing"):
        directory.newest_intact()


def test_a_link_in_the_place_of_the_savers_directory_is_damage(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "ckpt")
    directory.open()
    newest = Path(directory.save(1, writer()).path)
    directory.close()
    (newest / "model.ckpt-1.parts").rename(tmp_path / "elsewhere")
    (newest / "model.ckpt-1.parts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpointError, match=r"parts/empty is a symlink where a file"):
        directory.newest_intact()


@pytest.mark.parametrize("leave", [a_file, a_directory])
def test_what_appears_while_a_checkpoint_is_written_is_no_part_of_it(
    tmp_path: Path, leave: Callable[[Path], None]
) -> None:
    def write(prefix: str) -> None:
        writer()(prefix)
        leave(Path(prefix).parent)

    directory = CheckpointDirectory(tmp_path)
    directory.open()
    saved = Path(directory.save(1, write).path)
    directory.close()
    for root, names, files in os.walk(saved, topdown=False):
        for each in files:
            if ".DS_Store" in each or ".ipynb" in root:
                os.remove(os.path.join(root, each))
        for each in names:
            if each == ".ipynb_checkpoints":
                os.rmdir(os.path.join(root, each))
    newest = directory.newest_intact()
    assert newest is not None
    assert newest.step == 1


def test_what_others_leave_in_an_object_store_does_not_count(tmp_path: Path) -> None:
    obstore = pytest.importorskip("obstore")
    place = tmp_path / "objects"
    store = CheckpointStore(
        obstore.store.LocalStore(place, mkdir=True), retention=Retention(max_to_keep=1)
    )
    store.open()
    for step in (1, 2):
        store.save(step, writer())
        for each in place.glob(f"*/model.ckpt-{step}"):
            (each / ".DS_Store").write_bytes(b"icons")
            (each / "notes.txt").write_bytes(b"good")
        (place / ".DS_Store").write_bytes(b"icons")
        newest = store.newest_intact()
        assert newest is not None
        assert newest.step == step
        assert [each.step for each in store.checkpoints()] == [step]
    store.reject(store.checkpoints()[0], "it diverged")
    assert store.checkpoints() == []
    assert store.newest_intact() is None
    store.close()
    assert (place / ".DS_Store").exists()


@pytest.mark.anyio
async def test_training_goes_on_from_a_checkpoint_with_foreign_files(tmp_path: Path) -> None:
    weights = {"w": np.zeros(1)}

    async def train(last_step: int) -> int:
        saver = StateDictSaver(weights=weights)
        hooks = [
            CheckpointSaverHook(tmp_path, save_steps=1, saver=saver),
            StopAtStepHook(last_step=last_step),
        ]
        async with MonitoredSession(hooks, FunctionSessionCreator(dict)) as session:
            first = session.global_step.value
            while not session.should_stop():
                await session.run([])
        return first

    assert await train(3) == 0
    for step in range(4):
        a_file(tmp_path / f"model.ckpt-{step}")
        a_directory(tmp_path / f"model.ckpt-{step}")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert await train(5) == 3
