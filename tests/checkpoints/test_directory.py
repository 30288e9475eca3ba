"""Saving, listing, choosing, replacing and rejecting, on a disk that works."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks._errors import CheckpointError, MetricError
from asynchooks.checkpoints import Checkpoint, CheckpointDirectory, Mode, Retention, _directory
from asynchooks.checkpoints._manifest import read_manifest

from .stores import names_in, newest_step, opened, save, steps_in, writer


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


def test_a_step_saved_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5, 6)
    with opened(tmp_path) as directory:
        saved = directory.save(5, writer(b"again"))
        assert directory.newest_intact() == saved
    assert saved.serial == 3
    assert Path(saved.prefix).read_bytes() == b"again"
    assert names_in(tmp_path) == ["model.ckpt-5", "model.ckpt-6"]


def test_a_failed_save_of_the_same_step_leaves_the_earlier_one(tmp_path: Path) -> None:
    (before,) = save(tmp_path, 5)

    def fail(prefix: str) -> None:
        writer()(prefix)
        raise KeyError("w")

    with opened(tmp_path) as directory:
        with pytest.raises(KeyError):
            directory.save(5, fail)
        assert directory.newest_intact() == before
    assert names_in(tmp_path) == ["model.ckpt-5"]


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
    with opened(tmp_path, retention=Retention(keep_best=1)) as directory:
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
    with pytest.raises(RuntimeError, match="is not open"):
        directory.set_metric(3, 1.0)


def test_a_kill_while_a_metric_is_written_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as directory:
        directory.save(3, writer())
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", _killed)
            patch.setattr(_directory, "remove_tree", _killed)
            with pytest.raises(KeyboardInterrupt):
                directory.set_metric(3, 1.0)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".new-")]
    with opened(tmp_path) as directory:
        found = directory.newest_intact()
        assert found is not None
        assert (found.step, found.metric) == (3, None)
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".new-")]


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
        with pytest.raises(CheckpointError, match="cannot be moved to"):
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
