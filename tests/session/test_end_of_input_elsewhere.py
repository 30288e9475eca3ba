"""The end of an input where training reads none: no clean end, and a word of where it was."""

from __future__ import annotations

import pathlib

import anyio
import anyio.lowlevel
import pytest

from asynchooks import FunctionSessionCreator, MonitoredSession

from ..support.faults import Fault, Kind, Witness, current_worker
from .test_failure_matrix_savers import hook_of, save_one

pytestmark = pytest.mark.anyio


def creator() -> FunctionSessionCreator:
    return FunctionSessionCreator(lambda: {"loss": 0.5})


async def test_an_end_of_input_in_a_side_task_ends_no_session_around_it() -> None:
    async def read_to_the_end() -> None:
        raise StopAsyncIteration

    with pytest.raises(RuntimeError, match="StopAsyncIteration"):
        async with MonitoredSession([], creator()):
            async with MonitoredSession([], creator()) as session:
                session.start_soon(read_to_the_end)
                while not session.should_stop():
                    await session.run("loss")
                    await anyio.lowlevel.checkpoint()


async def test_an_end_of_input_in_restore_names_the_hook(tmp_path: pathlib.Path) -> None:
    await save_one(tmp_path)
    current_worker.set(0)
    hook = hook_of(tmp_path, Fault("restore", Kind.INPUT_ENDS), background=False)
    with pytest.raises(RuntimeError, match="CheckpointSaverHook"):
        async with MonitoredSession([Witness(), hook], creator()):
            raise AssertionError("it was opened")
