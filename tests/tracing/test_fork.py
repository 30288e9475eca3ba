"""A process that is forked in a recorded session has nothing to do with the parent's recorder."""

import asyncio
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import MonitoredSession, TraceHook

# private: only with its lock can the recorder be kept busy at the moment of the fork
from asynchooks._engine.recording import Place

from ..support.helpers import counting_creator
from ..support.step_loops import run_steps
from .reading import read

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform == "win32", reason="there is no fork"),
]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("has_hook", [False, True])
def test_a_session_of_a_forked_process_does_not_wait_for_the_parents_recorder(
    tmp_path: Path, has_hook: bool
) -> None:
    path = tmp_path / "run.pftrace"

    async def main() -> int:
        hook = TraceHook(path)
        async with MonitoredSession([hook], counting_creator()) as session:
            await session.run([])
            status = fork_in_the_flush(*[hook] * has_hook)
            await session.run([])
        return status

    assert os.waitstatus_to_exitcode(anyio.run(main)) == 0
    if not has_hook:  # else it has replaced the file, as any process that is given the path
        assert len(read(path).of("run")) == 2


def fork_in_the_flush(*hooks: TraceHook) -> int:
    """The status of a process that has trained, forked while a thread has the recorder's lock."""
    place: Any = Place.current()
    is_held, is_forked = threading.Event(), threading.Event()

    def flush() -> None:
        with place.recorder.lock:
            is_held.set()
            is_forked.wait(60)

    thread = threading.Thread(target=flush)
    thread.start()
    is_held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it would hang
        status = 1
        with suppress(BaseException):  # anyio takes the loop of the parent for its own
            asyncio.run(run_steps(counting_creator(), 1, *hooks))
            status = 0
        os._exit(status)
    is_forked.set()
    thread.join()
    return os.waitpid(child, 0)[1]
