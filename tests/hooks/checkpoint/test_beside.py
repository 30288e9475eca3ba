"""CheckpointSaverHook on step functions: saves beside a block that does not end, or just ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointInUseError,
    CheckpointSaverHook,
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunHook,
)
from asynchooks.checkpoints import CheckpointDirectory

from ...support.helpers import settle
from ..savers import Cell, CopyingSaver, Counter, PlainSaver, saved, threads_left, until
from .test_background import Held
from .test_refusals import session_on

pytestmark = pytest.mark.anyio
SAVERS = pytest.mark.parametrize(
    ("saver", "background"), [(PlainSaver, False), (CopyingSaver, False), (CopyingSaver, True)]
)


def is_free(path: Path) -> bool:
    """Whether another run may use the directory."""
    directory = CheckpointDirectory(path)
    try:
        directory.open()
    except CheckpointInUseError:
        return False
    directory.close()
    return True


@SAVERS
async def test_the_end_waits_for_a_save_beside_it(
    saver: type[PlainSaver], background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, saver, background=background, save_steps=9)
    async with held.session, anyio.create_task_group() as group:
        await held.run(1)
        checkpointer = held.hook.checkpointer
        await checkpointer.writer.wait_idle()
        held.latch.close()
        for _ in range(2):  # the second is in line when the end comes
            group.start_soon(lambda: checkpointer.save_beside(timeout=9))
        await held.latch.wait_for_arrival()
        group.start_soon(held.session.close)
        await settle()
        held.latch.open()
    assert saved(tmp_path) == {0: "0", 1: "1"}
    assert held.written() == [0, 1]
    assert threads_left() == []
    assert is_free(tmp_path)


async def test_an_end_without_patience_frees_the_directory_when_the_save_beside_it_ends(
    tmp_path: Path,
) -> None:
    cell = Cell()
    saver = CopyingSaver(cell)
    hook = CheckpointSaverHook(tmp_path, save_steps=9, saver=saver)
    creator = FunctionSessionCreator(cell.step)
    session = MonitoredSession([hook], creator, stop_grace_period_secs=0)
    async with anyio.create_task_group() as group:
        with pytest.raises(KeyError, match="mine"):
            async with session:
                await session.run([])
                saver.latch.close()
                group.start_soon(lambda: hook.checkpointer.save_beside(timeout=9))
                await saver.latch.wait_for_arrival()
                raise KeyError("mine")
        assert not is_free(tmp_path)
        saver.latch.open()
    await until(lambda: is_free(tmp_path))
    assert saved(tmp_path) == {0: "0", 1: "1"}


@SAVERS
async def test_a_step_that_is_saved_is_not_saved_again_beside(
    saver: type[PlainSaver], background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, saver, background=background, save_steps=2)
    async with held.session:
        for _ in range(3):
            await held.run(1)
            for _ in range(2):
                await held.hook.checkpointer.save_beside(timeout=9)
    assert held.written() == [0, 1, 2, 3]


class Early(SessionRunHook):
    """Saves beside before the saver hook, which comes later in the list, knows of a session."""

    def __init__(self, hook: CheckpointSaverHook, path: Path) -> None:
        self.hook, self.path = hook, path

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await self.hook.checkpointer.save_beside(timeout=0.0)
        assert saved(self.path) == {}


async def test_before_the_creation_and_after_the_end_nothing_is_saved_beside(
    tmp_path: Path,
) -> None:
    cell = Cell()
    hook = CheckpointSaverHook(tmp_path, save_steps=9, saver=PlainSaver(cell))
    session = session_on(cell, Early(hook, tmp_path), hook)
    async with session:
        assert saved(tmp_path) == {0: "0"}
        await session.run([])
        cell.value = 5
    cell.value = 7
    await hook.checkpointer.save_beside(timeout=0.0)
    assert saved(tmp_path) == {0: "0", 1: "5"}
    assert is_free(tmp_path)


async def test_after_an_error_a_step_that_is_not_saved_stays_so(tmp_path: Path) -> None:
    held = Held(tmp_path, PlainSaver, save_steps=9)
    with pytest.raises(KeyError, match="mine"):
        async with held.session:
            await held.run(1)
            raise KeyError("mine")
    await held.hook.checkpointer.save_beside(timeout=0.0)
    assert held.written() == [0]


class CountsItsEnd(Counter):
    """Its state is another after its end."""

    async def end(self, session: Any) -> None:
        self.runs += 100


class SavesBeside(SessionRunHook):
    def __init__(self, hook: CheckpointSaverHook) -> None:
        self.hook = hook

    async def end(self, session: Any) -> None:
        await self.hook.checkpointer.save_beside(timeout=9)


async def test_beside_the_end_the_hooks_are_saved_as_the_last_run_left_them(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        cell, counter = Cell(), CountsItsEnd()
        hook = CheckpointSaverHook(tmp_path, save_steps=9, saver=PlainSaver(cell))
        async with session_on(cell, counter, SavesBeside(hook), hook) as session:
            assert counter.runs == cell.value
            await session.run([])
