"""Whatever happens to a byte of a checkpoint is found, named, and passed over."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks._errors import CheckpointVersionError, DamagedCheckpointError
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.checkpoints._manifest import read_manifest

from .stores import newest_step, opened, rewrite, save, steps_in

FILES = ["model.ckpt-2", "model.ckpt-2.index", "hooks.json", "manifest.json"]


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """The directory of the newer of two checkpoints."""
    save(tmp_path, 1, 2, extra={"hooks.json": b'{"a": 1}'})
    return tmp_path / "model.ckpt-2"


def damage_of(path: Path) -> str:
    with pytest.raises(DamagedCheckpointError) as caught:
        read_manifest(str(path)).verify(str(path))
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_truncated_file_is_found(newest: Path, name: str, part: float) -> None:
    size = (newest / name).stat().st_size
    there = int((size - 1) * part)
    os.truncate(newest / name, there)
    assert newest_step(newest.parent) == 1
    wanted = f"{newest}: {name} is truncated to {there} of {size} bytes"
    if name == "manifest.json":
        wanted = f"{newest}: manifest.json cannot be read: it is truncated or overwritten"
    assert wanted in damage_of(newest)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_found(newest: Path, name: str) -> None:
    content = (newest / name).read_bytes()
    for position in range(len(content)):
        bit = 1 << position % 8
        flipped = bytearray(content)
        flipped[position] ^= bit
        (newest / name).write_bytes(flipped)
        assert f"{newest}: {name} " in damage_of(newest)
    assert newest_step(newest.parent) == 1
    (newest / name).write_bytes(content)
    assert newest_step(newest.parent) == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_any_other_bytes_of_a_manifest_are_damage(newest: Path, data: Any) -> None:
    target = newest / "manifest.json"
    content = target.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    changed = content[:start] + data.draw(st.binary(max_size=8)) + content[end:]
    target.write_bytes(changed)
    if changed != content:
        assert "manifest.json" in damage_of(newest)
        assert steps_in(newest.parent) == [1]
    target.write_bytes(content)


def replaced_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_symlink(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def replaced_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def ended_with_newline(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"!")


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("model.ckpt-2", Path.unlink, "model.ckpt-2 is missing"),
        ("model.ckpt-2.parts/empty", Path.unlink, "model.ckpt-2.parts/empty is missing"),
        ("hooks.json", Path.unlink, "hooks.json is missing"),
        ("manifest.json", Path.unlink, r"no manifest (manifest.json is missing)"),
        ("model.ckpt-2", grown, "model.ckpt-2 has 7 bytes where 6 were written"),
        ("model.ckpt-2.parts/empty", grown, "has 1 bytes where 0 were written"),
        ("manifest.json", ended_with_newline, "manifest.json has different content"),
        ("model.ckpt-2", replaced_by_directory, "is a directory where a file was written"),
        ("model.ckpt-2", replaced_by_symlink, "model.ckpt-2 is a symlink where a file"),
        ("model.ckpt-2", replaced_by_fifo, "model.ckpt-2 is a special file where a file"),
        ("manifest.json", replaced_by_symlink, "manifest.json is a symlink where a file"),
        ("manifest.json", replaced_by_directory, "cannot be read: [Errno 21] Is a directory"),
        ("extra", Path.touch, "extra is an unknown file, not listed in manifest.json"),
        ("model.ckpt-2.parts/x", Path.touch, "model.ckpt-2.parts/x is an unknown file"),
        ("model.ckpt-2.parts/manifest.json", Path.touch, "is an unknown file"),
    ],
)
def test_a_file_that_is_not_as_it_was_is_named(
    newest: Path,
    name: str,
    harm: Callable[[Path], object],
    words: str,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    harm(newest / name)
    with caplog.at_level(logging.WARNING, logger="asynchooks"):
        assert newest_step(newest.parent) == 1
    assert [words in each and str(newest) in each for each in caplog.messages] == [True]
    assert words in damage_of(newest)


def test_a_renamed_checkpoint_is_damaged(newest: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest.rename(newest.parent / "model.ckpt-9")
    assert newest_step(newest.parent) == 1
    assert "its manifest is that of model.ckpt-2: it was renamed" in caplog.text


@pytest.mark.parametrize("is_link", [True, False])
def test_what_is_named_like_a_checkpoint_and_is_no_directory_is_damaged(
    newest: Path, is_link: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = newest.parent / "model.ckpt-9"
    path.symlink_to(newest) if is_link else path.touch()
    assert newest_step(newest.parent) == 2
    assert "model.ckpt-9: is no directory, though it is named like a checkpoint" in caplog.text


def test_where_none_is_intact_each_damage_is_told(newest: Path) -> None:
    (newest / "manifest.json").unlink()
    os.truncate(newest.parent / "model.ckpt-1/model.ckpt-1", 3)
    with pytest.raises(DamagedCheckpointError) as caught:
        CheckpointDirectory(newest.parent).newest_intact()
    lines = str(caught.value).splitlines()
    assert lines == [
        f"{newest.parent} holds no intact checkpoint, but damaged ones:",
        f"  {newest}: no manifest (manifest.json is missing)",
        f"  {newest.parent}/model.ckpt-1: model.ckpt-1 is truncated to 3 of 6 bytes",
        "start anew in another directory, or move the damaged ones away to start anew in this one",
    ]


def test_a_newer_version_is_an_error_and_no_damage(newest: Path) -> None:
    rewrite(newest / "manifest.json", version=2, files=None)
    directory = CheckpointDirectory(newest.parent)
    words = "model.ckpt-2 was written in version 2 .* reads up to version 1; update asynchooks"
    for read in (directory.newest_intact, directory.best, directory.checkpoints, directory.open):
        with pytest.raises(CheckpointVersionError, match=words):
            read()
    found = directory.newest_intact(up_to_step=1)
    assert found is not None
    assert found.step == 1
    rewrite(newest / "manifest.json", version=1)
    with opened(newest.parent):
        """The failed `open` gave the lock back."""


def test_a_manifest_with_the_same_content_is_intact(newest: Path) -> None:
    rewrite(newest / "manifest.json", version=1)
    assert newest_step(newest.parent) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "2"}, {"version": 0}, {"files": None}, {"files": [1]}, {"step": None},
        {"seconds": "x"},
        {"metric": 5}, {"serial": "x"}, {"files": {"a": {"size": 1}}}, {"format": "other"},
    ],
)  # fmt: skip
def test_a_foreign_manifest_is_damage(newest: Path, changes: dict[str, object]) -> None:
    rewrite(newest / "manifest.json", **changes)
    assert "manifest.json" in damage_of(newest)
    assert newest_step(newest.parent) == 1


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"5", b"[]", b"\xff", b'{"version": 2}'])
def test_foreign_bytes_are_damage(newest: Path, raw: bytes) -> None:
    (newest / "manifest.json").write_bytes(raw)
    assert "manifest.json" in damage_of(newest)


def test_a_damaged_extra_file_is_not_read(newest: Path) -> None:
    directory = CheckpointDirectory(newest.parent)
    checkpoint = directory.checkpoints()[-1]
    (newest / "hooks.json").write_bytes(b'{"a": 2}')
    with pytest.raises(DamagedCheckpointError, match="hooks.json has different content"):
        directory.read_extra(checkpoint, "hooks.json")
    (newest / "hooks.json").unlink()
    with pytest.raises(DamagedCheckpointError, match="cannot be read: .*No such file"):
        directory.read_extra(checkpoint, "hooks.json")
    with pytest.raises(ValueError, match="'../lock' is no name of an extra file"):
        directory.read_extra(checkpoint, "../lock")
    with pytest.raises(ValueError, match="names that begin with 'model.ckpt-2' are the saver's"):
        directory.read_extra(checkpoint, "model.ckpt-2.index")
