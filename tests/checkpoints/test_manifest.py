"""Whatever happens to a byte of a checkpoint is found, named, and passed over."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks._errors import CheckpointError, CheckpointVersionError, DamagedCheckpointError
from asynchooks.checkpoints import CheckpointDirectory, _manifest
from asynchooks.checkpoints._manifest import read_manifest

from .stores import make_socket, newest_step, opened, rewrite, save, steps_in, writer

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


def replaced_by_socket(path: Path) -> None:
    path.unlink()
    make_socket(path)


def replaced_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def replaced_by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replaced_by_gigabytes(path: Path) -> None:
    os.truncate(path, 3 << 30)  # sparse: it takes no room on the disk


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
        ("manifest.json", replaced_by_directory, "manifest.json is a directory where a file"),
        ("manifest.json", replaced_by_fifo, "manifest.json is a special file where a file"),
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


HARMS = [
    replaced_by_fifo, replaced_by_socket, replaced_by_loop, replaced_by_device,
    replaced_by_directory, replaced_by_gigabytes,
]  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_its_size_is_neither_waited_for_nor_read(
    newest: Path, name: str, harm: Callable[[Path], object]
) -> None:
    directory = CheckpointDirectory(newest.parent)
    checkpoint = directory.checkpoints()[-1]
    harm(newest / name)
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


@pytest.mark.parametrize("harm", HARMS)
def test_leftovers_that_hold_no_file_of_their_size_are_swept(
    newest: Path, harm: Callable[[Path], object]
) -> None:
    save(newest.parent, 3)
    name = ".new-model.ckpt-3-3"
    (newest.parent / "model.ckpt-3").rename(newest.parent / name)
    harm(newest.parent / name / "manifest.json")
    with opened(newest.parent):
        assert steps_in(newest.parent) == [1, 2]
    assert not (newest.parent / name).exists()


def test_a_link_among_the_leftovers_becomes_no_checkpoint(newest: Path, tmp_path: Path) -> None:
    newest.rename(tmp_path / "elsewhere")
    (tmp_path / ".new-model.ckpt-2-2").symlink_to("elsewhere")
    with opened(tmp_path):
        assert steps_in(tmp_path) == [1]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


@pytest.mark.faults
@pytest.mark.parametrize(("name", "depth"), [("d", 1100), ("d" * 250, 20)])
def test_foreign_directories_deeper_than_recursion_and_than_paths_may_be_are_ignored(
    newest: Path, name: str, depth: int
) -> None:
    here = Path.cwd()
    os.chdir(newest)
    for _ in range(depth):
        os.mkdir(name)
        os.chdir(name)
    os.chdir(here)
    try:
        assert newest_step(newest.parent) == 2
        newest.rename(newest.parent / ".new-model.ckpt-3-3")  # it is removed, or logged
        with opened(newest.parent) as directory:
            directory.save(4, writer())
    finally:
        left = newest.parent / ".new-model.ckpt-3-3"
        subprocess.run(["rm", "-rf", newest, left], check=True)  # pytest's own is recursive


def test_a_manifest_that_would_be_too_large_to_read_is_not_written(
    newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_manifest, "MAX_BYTES", 1000)
    words = r"model.ckpt-3 is not saved: to name its 9 files manifest.json would take 1,.* bytes"

    def write(prefix: str) -> None:
        for number in range(9):
            Path(f"{prefix}.{number}").touch()

    with opened(newest.parent) as directory, pytest.raises(CheckpointError, match=words):
        directory.save(3, write)
    assert steps_in(newest.parent) == [1, 2]
    assert not [each for each in os.listdir(newest.parent) if each.startswith(".new")]


@pytest.mark.parametrize("is_link", [True, False])
def test_what_is_named_like_a_checkpoint_and_is_no_directory_is_damaged(
    newest: Path, is_link: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = newest.parent / "model.ckpt-9"
    path.symlink_to(newest) if is_link else path.touch()
    assert newest_step(newest.parent) == 2
    assert "model.ckpt-9: is no directory, though it is named like a checkpoint" in caplog.text


def test_where_none_is_intact_each_damage_is_listed(newest: Path) -> None:
    (newest / "manifest.json").unlink()
    os.truncate(newest.parent / "model.ckpt-1/model.ckpt-1", 3)
    with pytest.raises(DamagedCheckpointError) as caught:
        CheckpointDirectory(newest.parent).newest_intact()
    lines = str(caught.value).splitlines()
    assert lines == [
        f"{newest.parent} holds no intact checkpoint, but damaged ones:",
        f"  {newest}: no manifest (manifest.json is missing)",
        f"  {newest.parent}/model.ckpt-1: model.ckpt-1 is truncated to 3 of 6 bytes",
        "start over in another directory, or move the damaged ones away to start over here",
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


NO_STEPS: list[Any] = [True, "2", 2.0, -2, 1e400, math.nan, [2], None, 10**4000]
NO_SERIALS: list[Any] = [True, "2", 2.0, 0, -1, 1e400, 10**30, {}]
NO_SECONDS: list[Any] = [0.0, "inf", "nan", "-0x1p+1", "0x1p+99999", "0x" + "9" * 5000, [], True]
NO_METRICS: list[Any] = [0.5, "nan", "0x1p+99999", "x", [], {}]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "2"}, {"version": 0}, {"files": None}, {"files": [1]}, {"step": None},
        {"seconds": "x"},
        {"metric": 5}, {"serial": "x"}, {"files": {"a": {"size": 1}}}, {"format": "other"},
        {"version": True}, {"version": 1.0}, {"version": [1]}, {"version": 1e400},
        {"format": ["asynchooks checkpoint"]}, {"basename": 3}, {"basename": ["model.ckpt"]},
        *({"step": each} for each in NO_STEPS),
        *({"serial": each} for each in NO_SERIALS),
        *({"seconds": each} for each in NO_SECONDS),
        *({"metric": each} for each in NO_METRICS),
        {"files": []}, {"files": 3}, {"files": {"a": 3}}, {"files": {"a": []}},
        *({"files": {"a": {"size": each, "sha256": "0" * 64}}}
          for each in (True, "1", 1.0, -1, 1e400, 10**30, None)),
        *({"files": {"a": {"size": 1, "sha256": each}}} for each in ("", "0" * 63, "G" * 64, 3)),
        *({"files": {each: {"size": 1, "sha256": "0" * 64}}}
          for each in ("", "..", "../a", "a/../b", "/a", "a/", "./a", "a//b", "a\0b")),
    ],
    ids=lambda changes: repr(changes)[:70],
)  # fmt: skip
def test_a_foreign_manifest_is_damage(newest: Path, changes: dict[str, object]) -> None:
    rewrite(newest / "manifest.json", **changes)
    assert "manifest.json" in damage_of(newest)
    assert newest_step(newest.parent) == 1
    assert steps_in(newest.parent) == [1]
    with opened(newest.parent) as directory:
        directory.save(3, writer())


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"5", b"[]", b"\xff", b'{"version": 2}'])
def test_foreign_bytes_are_damage(newest: Path, raw: bytes) -> None:
    (newest / "manifest.json").write_bytes(raw)
    assert "manifest.json" in damage_of(newest)
    assert newest_step(newest.parent) == 1


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_a_manifest_at_the_limit_of_recursion_is_damage(newest: Path) -> None:
    depth = 100
    with suppress(RecursionError):
        while json.loads(nested(depth)):
            depth += max(20, depth // 50)
    step = max(1, depth // 1000)
    for each in range(depth - 40 * step, depth, step):  # some can be read and not be written
        text = f'{{"format": "asynchooks checkpoint", "metric": {nested(each)}}}'
        (newest / "manifest.json").write_text(text)
        assert "manifest.json" in damage_of(newest)
        assert newest_step(newest.parent) == 1


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
