"""CheckpointSaverHook on step functions: what it refuses, and whom that leaves unharmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointInUseError,
    CheckpointSaverHook,
    EvaluationHook,
    FunctionSessionCreator,
    MonitoredSession,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..savers import Cell, Counter, PlainSaver, saved

pytestmark = pytest.mark.anyio
IN_USE = "this CheckpointSaverHook is in use already; give each session one of its own"


def session_on(cell: Cell, *hooks: Any) -> MonitoredSession:
    return MonitoredSession(hooks, FunctionSessionCreator(cell.step))


async def test_a_second_session_with_a_hook_in_use_leaves_the_first_one_unharmed(
    tmp_path: Path,
) -> None:
    cell, counter = Cell(), Counter()
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=PlainSaver(cell))
    async with session_on(cell, hook, counter) as first:
        await first.run([])
        for _ in range(2):
            with pytest.raises(RuntimeError, match=IN_USE):
                async with session_on(Cell(), hook, Counter()):
                    pass
        with pytest.raises(CheckpointInUseError):
            CheckpointDirectory(tmp_path).open()
        for _ in range(2):
            await first.run([])
    assert saved(tmp_path) == {0: "0", 2: "2", 3: "3"}
    cell, counter = Cell(), Counter()
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=PlainSaver(cell))
    async with session_on(cell, hook, counter):
        assert (cell.value, counter.runs) == (3, 3), "the state of the first session's hooks"


async def test_a_refusal_that_leaves_the_first_sessions_block_frees_the_directory(
    tmp_path: Path,
) -> None:
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=PlainSaver(Cell()))
    with pytest.raises(RuntimeError, match=IN_USE):
        async with session_on(Cell(), hook), session_on(Cell(), hook):
            pass
    directory = CheckpointDirectory(tmp_path)
    directory.open()
    directory.close()
    async with session_on(Cell(), hook):
        pass


async def test_a_refusal_behind_another_error_leaves_the_first_session_unharmed(
    tmp_path: Path,
) -> None:
    cell = Cell()
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=PlainSaver(cell))
    async with session_on(cell, hook) as first:
        second = session_on(Cell(), hook)
        second.request_stop(KeyError("mine"))
        with pytest.raises(KeyError, match="mine"):
            await second.__aenter__()
        await first.run([])
    assert saved(tmp_path) == {0: "0", 1: "1"}


async def test_a_hook_that_is_listed_twice_frees_the_directory(tmp_path: Path) -> None:
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=PlainSaver(Cell()))
    with pytest.raises(RuntimeError, match="list it once"):
        async with session_on(Cell(), hook, hook):
            pass
    async with session_on(Cell(), hook):
        pass


@pytest.mark.parametrize("retention", [3, "5", True])
def test_a_retention_that_is_none_is_refused(retention: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"retention is .*; give Retention\(max_to_keep=3\)"):
        CheckpointSaverHook(tmp_path, save_steps=1, retention=retention)


async def test_a_metric_of_an_evaluation_that_never_takes_place_is_refused(tmp_path: Path) -> None:
    evaluation = EvaluationHook(lambda session, step: {"loss": 0.5}, every_n_steps=1)
    cell = Cell()
    hook = CheckpointSaverHook(
        tmp_path, save_steps=1, saver=PlainSaver(cell), metric=evaluation.metric("loss")
    )
    message = "CheckpointSaverHook decides by a metric of an EvaluationHook that is none of the"
    with pytest.raises(RuntimeError, match=message):
        async with session_on(cell, hook):
            pass
    async with session_on(cell, hook, evaluation):
        pass
