"""CheckpointSaverHook on step functions: whose directory it is, and what is wrong in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointInUseError,
    CheckpointSaverHook,
    CheckpointVersionError,
    DamagedCheckpointError,
    FunctionSessionCreator,
    MonitoredSession,
)

from ...checkpoints.stores import REPOSITORY, rewrite, run_python
from ..preemptions import At
from ..savers import Cell, CopyingSaver, Held, saved

pytestmark = pytest.mark.anyio


async def check_that_it_is_free(path: Path) -> None:
    async with Held(path).session:
        pass


async def test_a_second_hook_on_a_directory_is_refused_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    first = Held(tmp_path)
    async with first.session:
        with pytest.raises(CheckpointInUseError, match="this process uses it already") as caught:
            await Held(tmp_path).session.__aenter__()
        assert caught.value.pid == os.getpid()
        assert "in begin of CheckpointSaverHook" in caught.value.__notes__
        await first.run(1)
    assert saved(tmp_path) == {0: "0", 1: "1"}
    await check_that_it_is_free(tmp_path)


async def test_two_hooks_of_one_session_are_refused_and_it_is_free(tmp_path: Path) -> None:
    saver = CopyingSaver(Cell())
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1, saver=saver) for _ in range(2)]
    with pytest.raises(CheckpointInUseError):
        await MonitoredSession(hooks, FunctionSessionCreator(dict)).__aenter__()
    await check_that_it_is_free(tmp_path)


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(
    "moments",
    [["begin"], ["after_create_session"], ["after_run"], ["end"], ["begin", "on_error"]],
    ids=lambda moments: moments[-1],
)
async def test_it_is_free_after_an_error_of_another_hook(
    moments: list[str], place: str, tmp_path: Path
) -> None:
    others: Any = {place: [At(**dict.fromkeys(moments, fail))]}
    held = Held(tmp_path, **others)
    with pytest.raises(ZeroDivisionError):
        async with held.session:
            await held.run(1)
    await check_that_it_is_free(tmp_path)


OTHER = """
import sys, anyio
from asynchooks import CheckpointSaverHook, FunctionSessionCreator, MonitoredSession
from asynchooks import StateDictSaver

async def main():
    saver = StateDictSaver(weights={"w": 1.0})
    hook = CheckpointSaverHook(sys.argv[1], save_steps=1, saver=saver, background=True)
    async with MonitoredSession([hook], FunctionSessionCreator(dict)) as session:
        await session.run([])
        print("open", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.faults
def test_another_process_is_named_until_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            with pytest.raises(CheckpointInUseError, match=f"process id {process.pid}") as caught:
                anyio.run(check_that_it_is_free, tmp_path)
            assert caught.value.pid == process.pid
        finally:
            process.send_signal(signal.SIGKILL)
    for path in tmp_path.glob("*model.ckpt-*"):  # of another saver, one perhaps half written
        shutil.rmtree(path)
    anyio.run(check_that_it_is_free, tmp_path)


async def two_checkpoints(path: Path) -> None:
    held = Held(path, save_steps=9)
    async with held.session:
        await held.run(3)


def files_in(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: os.truncate(file, 0),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("name", ["model.ckpt-3", "hooks.json", "manifest.json"])
async def test_the_newest_with_any_damage_is_passed_over_with_a_warning(
    damage: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await two_checkpoints(tmp_path)
    DAMAGES[damage](tmp_path / "model.ckpt-3" / name)
    held = Held(tmp_path, save_steps=9)
    async with held.session:
        assert held.saver.log == ["restore 0"]
        assert (held.cell.value, held.session.global_step.value) == (0, 0)
        assert "model.ckpt-3" in caplog.text
        assert "passed over" in caplog.text


async def test_where_all_are_damaged_it_does_not_open_and_deletes_nothing(tmp_path: Path) -> None:
    await two_checkpoints(tmp_path)
    for step in (0, 3):
        flip(tmp_path / f"model.ckpt-{step}" / f"model.ckpt-{step}")
    there = files_in(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint"):
        await Held(tmp_path).session.__aenter__()
    assert files_in(tmp_path) == there


async def test_a_checkpoint_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    await two_checkpoints(tmp_path)
    rewrite(tmp_path / "model.ckpt-3" / "manifest.json", version=2)
    there = files_in(tmp_path)
    with pytest.raises(CheckpointVersionError, match="update asynchooks"):
        await Held(tmp_path).session.__aenter__()
    assert files_in(tmp_path) == there


@pytest.mark.parametrize("background", [False, True])
async def test_a_directory_that_is_removed_while_training_is_a_typed_error(
    background: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    held = Held(path, background=background)
    with pytest.raises(CheckpointError, match=str(path)):
        async with held.session:
            await held.wait_idle()
            shutil.rmtree(path)
            await held.run(1)
    assert not path.exists(), "it is not recreated"


FULL_DISK = """
import resource, sys, anyio
from pathlib import Path
from asynchooks import CheckpointError, CheckpointSaverHook, FunctionSessionCreator
from asynchooks import MonitoredSession, StateDictSaver
import numpy as np

async def main():
    weights = {"w": np.zeros(100_000)}
    def step():
        weights["w"] += 1
        return {}
    hook = CheckpointSaverHook(
        sys.argv[1], save_steps=1, saver=StateDictSaver(weights=weights),
        background=sys.argv[2] == "True",
    )
    try:
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            await session.run([])
            await hook.checkpointer.wait_idle()
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
            await session.run([])
    except CheckpointError as error:
        print("step 2 is not saved" in str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
        print(session.global_step.value, set(weights["w"].tolist()))
    print(sorted(each.name for each in Path(sys.argv[1]).iterdir()))

anyio.run(main)
"""


@pytest.mark.faults
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_a_typed_error_and_the_older_ones_are_untouched(
    background: bool, tmp_path: Path
) -> None:
    assert run_python(FULL_DISK, tmp_path, background).splitlines() == [
        "True",
        "1 {1.0}",
        "['lock', 'model.ckpt-0', 'model.ckpt-1']",
    ]
