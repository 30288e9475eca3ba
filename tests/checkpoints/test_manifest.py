"""Whatever happens to a byte of a checkpoint is found, named, and passed over."""

from __future__ import annotations

import math
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks._errors import CheckpointError, CheckpointVersionError, DamagedCheckpointError
from asynchooks.checkpoints import CheckpointDirectory, Retention, _manifest
from asynchooks.checkpoints._manifest import read_manifest

from .stores import make_socket, newest_step, opened, rewrite, save, steps_in, writer

FILES = ["model.ckpt-2", "hooks.json", "manifest.json"]


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
def test_any_flipped_bit_and_any_truncation_is_found(newest: Path, name: str) -> None:
    content = (newest / name).read_bytes()
    for position in range(0, len(content), 1 if len(content) < 100 else 7):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        for changed in (flipped, content[:position]):
            (newest / name).write_bytes(changed)
            assert f"{newest}: {name} " in damage_of(newest)
    assert newest_step(newest.parent) == 1
    (newest / name).write_bytes(content)
    assert newest_step(newest.parent) == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
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


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_symlink(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    path.unlink()
    make_socket(path)


def a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def gigabytes(path: Path) -> None:
    os.truncate(path, 3 << 30)  # sparse: it takes no room on the disk


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"!")


def linked_parent(path: Path) -> None:
    path.parent.rename(path.parents[2] / "elsewhere")
    path.parent.symlink_to(path.parents[2] / "elsewhere")


EMPTY = "model.ckpt-2.parts/empty"


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        *((each, Path.unlink, f"{each} is missing") for each in (*FILES, EMPTY)),
        ("model.ckpt-2", grown, "model.ckpt-2 has 7 bytes where 6 were written"),
        ("manifest.json", grown, "manifest.json cannot be read: it is truncated or overwritten"),
        ("model.ckpt-2", a_directory, "is a directory where a file was written"),
        ("model.ckpt-2", a_symlink, "model.ckpt-2 is a symlink where a file"),
        ("model.ckpt-2", a_fifo, "model.ckpt-2 is a special file where a file"),
        (EMPTY, linked_parent, "parts/empty is a symlink where a file"),
        ("manifest.json", a_symlink, "manifest.json is a symlink where a file"),
    ],
)
def test_a_file_that_is_not_as_it_was_is_named(
    newest: Path, name: str, harm: Callable[[Path], object], words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    harm(newest / name)
    assert newest_step(newest.parent) == 1
    assert [words in each and str(newest) in each for each in caplog.messages] == [True]
    assert words in damage_of(newest)


HARMS = [a_fifo, a_socket, a_loop, a_device, a_directory, gigabytes]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_its_size_is_neither_waited_for_nor_read(
    newest: Path, name: str, harm: Callable[[Path], object]
) -> None:
    directory = CheckpointDirectory(newest.parent)
    checkpoint = directory.checkpoints()[-1]
    shutil.copytree(newest, newest.parent / ".new-model.ckpt-3-3")
    for path in (newest, newest.parent / ".new-model.ckpt-3-3"):
        harm(path / name)
    tracemalloc.start()
    try:
        assert newest_step(newest.parent) == 1
        assert name in damage_of(newest)
        if name == "hooks.json":
            with pytest.raises(DamagedCheckpointError, match=r"hooks\.json"):
                directory.read_extra(checkpoint, name)
        with opened(newest.parent) as again:
            again.save(3, writer())
        assert newest_step(newest.parent) == 3
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert not (newest.parent / ".new-model.ckpt-3-3").exists()


def test_a_link_among_the_leftovers_becomes_no_checkpoint(newest: Path, tmp_path: Path) -> None:
    newest.rename(tmp_path / "elsewhere")
    for name in (".new-model.ckpt-2-2", ".old-model.ckpt-2-0"):
        (tmp_path / name).symlink_to("elsewhere")
    with opened(tmp_path):
        assert steps_in(tmp_path) == [1]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def leave_files(checkpoint: Path) -> None:
    """What file browsers, notebooks, network disks and people leave there."""
    (checkpoint / ".DS_Store").write_bytes(b"icons")
    (checkpoint / "notes.txt").write_text("the best one so far")
    (checkpoint / ".ipynb_checkpoints").mkdir()
    (checkpoint / ".ipynb_checkpoints" / "hooks-checkpoint.json").write_text("{}")
    (checkpoint / f"{checkpoint.name}.parts" / ".nfs0000000004c2").touch()
    (checkpoint / "latest").symlink_to("nowhere")


def test_foreign_files_do_not_count_and_go_with_their_checkpoint(
    newest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_files(tmp_path / "model.ckpt-1")
    leave_files(newest)
    with opened(tmp_path, retention=Retention(max_to_keep=2)) as directory:
        assert newest_step(tmp_path) == 2
        directory.save(3, writer())
        assert steps_in(tmp_path) == [2, 3]
        assert not (tmp_path / "model.ckpt-1").exists()
        directory.reject(directory.checkpoints()[0], "it diverged")
    assert steps_in(tmp_path) == [3]
    assert caplog.text.count("\n") == 1, "the rejection alone"


def test_what_appears_while_a_checkpoint_is_written_is_no_part_of_it(tmp_path: Path) -> None:
    foreign = [".DS_Store", ".ipynb_checkpoints"]

    def write(prefix: str) -> None:
        writer()(prefix)
        for name in foreign:
            Path(prefix).with_name(name).mkdir()
            Path(prefix).with_name(name).joinpath("file").touch()

    with opened(tmp_path) as directory:
        saved = directory.save(1, write)
    for name in foreign:
        shutil.rmtree(Path(saved.path, name))
    assert newest_step(tmp_path) == 1


def test_a_manifest_that_would_be_too_large_to_read_is_not_written(
    newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_manifest, "MAX_BYTES", 1000)

    def write(prefix: str) -> None:
        for number in range(9):
            Path(f"{prefix}.{number}").touch()

    with opened(newest.parent) as directory:
        with pytest.raises(CheckpointError, match="model.ckpt-3 is not saved: to name its 9 files"):
            directory.save(3, write)
    assert steps_in(newest.parent) == [1, 2]


@pytest.mark.parametrize("kind", ["renamed", "link", "file"])
def test_what_is_named_like_a_checkpoint_and_is_none_is_damaged(
    newest: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, words = newest.parent / "model.ckpt-9", "model.ckpt-9: is no directory, though it is nam"
    if kind == "renamed":
        shutil.copytree(newest, path)
        words = "its manifest is that of model.ckpt-2: it was renamed"
    else:
        path.symlink_to(newest) if kind == "link" else path.touch()
    assert newest_step(newest.parent) == 2
    assert words in caplog.text


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


NO_NUMBERS: list[Any] = [True, "2", 2.0, -2, 1e400, [2]]
FOREIGN: dict[str, list[Any]] = {
    "version": [True, "2", 0, [1], 1e400],
    "format": ["other", ["asynchooks checkpoint"]],
    "basename": [3, ["model.ckpt"]],
    "step": [*NO_NUMBERS, math.nan, None, 10**4000],
    "serial": [*NO_NUMBERS, 0, 10**30],
    "seconds": [0.0, "inf", "nan", "-0x1p+1", "0x1p+99999", "0x" + "9" * 5000, []],
    "metric": [0.5, "nan", "0x1p+99999", "x", {}],
    "files": [
        *(None, [1], 3, {"a": 3}, {"a": {"size": 1}}),
        *({"a": {"size": each, "sha256": "0" * 64}} for each in (*NO_NUMBERS, 10**30)),
        *({"a": {"size": 1, "sha256": each}} for each in ("", "0" * 63, "G" * 64, 3)),
        *(
            {each: {"size": 1, "sha256": "0" * 64}}
            for each in ("", "..", "../a", "a/../b", "/a", "a/", "./a", "a//b", "a\0b")
        ),
    ],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_manifest_is_damage(newest: Path, name: str) -> None:
    target = newest / "manifest.json"
    content = target.read_bytes()
    for value in FOREIGN[name]:
        rewrite(target, **{name: value})
        assert "manifest.json" in damage_of(newest), repr(value)[:99]
        target.write_bytes(content)
    rewrite(target, **{name: FOREIGN[name][0]})
    assert newest_step(newest.parent) == 1
    rewrite(newest.parent / "model.ckpt-1" / "manifest.json", version=1)  # as it was
    assert steps_in(newest.parent) == [1]
    with opened(newest.parent) as directory:
        directory.save(3, writer())


def test_a_damaged_extra_file_is_not_read(newest: Path) -> None:
    directory = CheckpointDirectory(newest.parent)
    checkpoint = directory.checkpoints()[-1]
    (newest / "hooks.json").write_bytes(b'{"a": 2}')
    with pytest.raises(DamagedCheckpointError, match="hooks.json has different content"):
        directory.read_extra(checkpoint, "hooks.json")
    (newest / "hooks.json").unlink()
    with pytest.raises(DamagedCheckpointError, match="cannot be read: .*No such file"):
        directory.read_extra(checkpoint, "hooks.json")
    assert directory.read_extra(checkpoint, "../lock") is None, "no checkpoint lists it"
