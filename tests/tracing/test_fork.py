"""A process that is forked in a recorded session has nothing to do with the parent's recorder."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import anyio
import pytest

from asynchooks import MonitoredSession, TraceHook
from asynchooks._engine.recording import Place
from asynchooks._tracing._recorder import FileRecorder

from ..support.helpers import counting_creator
from .reading import read

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform == "win32", reason="there is no fork"),
]


async def train(hook: TraceHook | None) -> None:
    hooks = [] if hook is None else [hook]
    async with MonitoredSession(hooks, counting_creator()) as session:
        await session.run([])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("has_hook", [False, True])
def test_a_session_of_a_forked_process_does_not_wait_for_the_parents_recorder(
    tmp_path: Path, has_hook: bool
) -> None:
    path = tmp_path / "run.pftrace"
    status = -1

    async def main() -> None:
        nonlocal status
        hook = TraceHook(path)
        async with MonitoredSession([hook], counting_creator()) as session:
            await session.run([])
            status = fork_in_the_flush(hook if has_hook else None)
            await session.run([])

    anyio.run(main)
    assert os.waitstatus_to_exitcode(status) == 0
    if not has_hook:  # else it has replaced the file, as any process that is given the path
        assert len(read(path).of("run")) == 2


def fork_in_the_flush(hook: TraceHook | None) -> int:
    """The status of a process that has trained, forked while a thread has the recorder's lock."""
    place = Place.current()
    assert place is not None
    recorder = place.recorder
    assert isinstance(recorder, FileRecorder)
    is_held, is_forked = threading.Event(), threading.Event()

    def flush() -> None:
        with recorder.lock:
            is_held.set()
            is_forked.wait(60)

    thread = threading.Thread(target=flush)
    thread.start()
    is_held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it would hang
        os._exit(_trains_in_child(hook))
    is_forked.set()
    thread.join()
    return os.waitpid(child, 0)[1]


def _trains_in_child(hook: TraceHook | None) -> int:
    try:
        asyncio.run(train(hook))  # as anyio takes the loop of the parent for its own
    except BaseException:
        return 1
    return 0
