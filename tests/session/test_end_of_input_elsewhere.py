"""The end of an input where training reads none: no clean end, and a word of where it was."""

from __future__ import annotations

import pathlib

import anyio
import anyio.lowlevel
import pytest

from asynchooks import FunctionSessionCreator, MonitoredSession

from ..support.faults import Fault, Kind, Witness, current_worker
from .test_failure_matrix_savers import IN_A_RUN, hook_of, save_one

pytestmark = pytest.mark.anyio


def creator() -> FunctionSessionCreator:
    return FunctionSessionCreator(lambda: {"loss": 0.5})


async def left_of_a_save_in_the_background(fault: Fault, directory: pathlib.Path) -> object:
    """What leaves a session that runs once more after the write has failed."""
    current_worker.set(0)
    hook = hook_of(directory, fault, background=True)
    try:
        async with MonitoredSession([hook], creator()) as session:
            for _ in range(4):
                await session.run("loss")
                await hook.checkpointer.wait_idle()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("kind", [Kind.INPUT_ENDS, Kind.ERROR])
@pytest.mark.parametrize("place", ["write", "listener's after_save"])
async def test_a_write_that_fails_in_the_background_fails_the_next_run(
    place: str, kind: Kind, tmp_path: pathlib.Path
) -> None:
    fault = Fault(place, kind, nth=IN_A_RUN)
    left = await left_of_a_save_in_the_background(fault, tmp_path)
    assert fault.num_played == 1
    assert left is fault.error if kind is Kind.ERROR else isinstance(left, RuntimeError)


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
