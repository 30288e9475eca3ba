"""CheckpointSaverHook on step functions: whose directory it is, and what is wrong in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointInUseError,
    CheckpointSaverHook,
    CheckpointVersionError,
    DamagedCheckpointError,
)

from ...checkpoints.stores import rewrite, run_python
from ..preemptions import At
from ..savers import Cell, CopyingSaver, Held, is_free, saved, session_on

pytestmark = pytest.mark.anyio


async def test_a_second_hook_on_a_directory_is_refused_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    first = Held(tmp_path)
    async with first.session:
        with pytest.raises(CheckpointInUseError, match="this process uses it already") as caught:
            await Held(tmp_path).session.__aenter__()
        assert "in begin of CheckpointSaverHook" in caught.value.__notes__
        await first.run(1)
    assert saved(tmp_path) == {0: "0", 1: "1"}
    saver = CopyingSaver(Cell())
    hooks = [CheckpointSaverHook(tmp_path, save_steps=1, saver=saver) for _ in range(2)]
    with pytest.raises(CheckpointInUseError):
        await session_on(saver.cell, *hooks).__aenter__()
    assert is_free(tmp_path)


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("moments", ["begin", "after_create_session", "end", "begin on_error"])
async def test_it_is_free_after_an_error_of_another_hook(
    moments: str, place: str, tmp_path: Path
) -> None:
    others: Any = {place: [At(**dict.fromkeys(moments.split(), fail))]}
    with pytest.raises(ZeroDivisionError):
        async with Held(tmp_path, **others).session:
            pass
    assert is_free(tmp_path)


async def two_checkpoints(path: Path) -> None:
    held = Held(path, save_steps=9)
    async with held.session:
        await held.run(3)


def files_in(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["model.ckpt-3", "hooks.json", "manifest.json"])
async def test_the_newest_with_any_damage_is_passed_over_with_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await two_checkpoints(tmp_path)
    damage(tmp_path / "model.ckpt-3" / name)
    held = Held(tmp_path, save_steps=9)
    async with held.session:
        assert held.saver.log == ["restore 0"]
        assert (held.cell.value, held.session.global_step.value) == (0, 0)
    assert "model.ckpt-3" in caplog.text
    assert "passed over" in caplog.text


@pytest.mark.parametrize("error", [DamagedCheckpointError, CheckpointVersionError])
async def test_where_none_can_be_read_it_does_not_open_and_deletes_nothing(
    error: type[Exception], tmp_path: Path
) -> None:
    await two_checkpoints(tmp_path)
    if error is CheckpointVersionError:
        rewrite(tmp_path / "model.ckpt-3" / "manifest.json", version=2)
    else:
        for step in (0, 3):
            damage(tmp_path / f"model.ckpt-{step}" / f"model.ckpt-{step}")
    there = files_in(tmp_path)
    with pytest.raises(error):
        await Held(tmp_path).session.__aenter__()
    assert files_in(tmp_path) == there


FULL_DISK = """
import resource, sys, anyio
from pathlib import Path
from asynchooks import CheckpointError, CheckpointSaverHook, FunctionSessionCreator
from asynchooks import MonitoredSession, StateDictSaver
import numpy as np

async def main(path, background):
    weights = {"w": np.zeros(100_000)}
    def step():
        weights["w"] += 1
        return {}
    saver = StateDictSaver(weights=weights)
    hook = CheckpointSaverHook(path, save_steps=1, saver=saver, background=background)
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
    print(sorted(each.name for each in Path(path).iterdir()))

for background in (False, True):
    anyio.run(main, f"{sys.argv[1]}/{background}", background)
"""


@pytest.mark.faults
def test_a_full_disk_is_a_typed_error_and_the_older_ones_are_untouched(tmp_path: Path) -> None:
    said = ["True", "1 {1.0}", "['lock', 'model.ckpt-0', 'model.ckpt-1']"]
    assert run_python(FULL_DISK, tmp_path).splitlines() == said * 2
