"""PreemptionHook where something does not end: the process does, in time, with what was saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import StateDictSaver
from asynchooks.checkpoints import CheckpointDirectory

from .preempted import one, saving_slowly, stuck, unread
from .programs import Running, running, server

pytestmark = [pytest.mark.timeout(100), pytest.mark.faults]
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def wait_for(run: Running, what: str) -> None:
    """Until the process has said so."""
    until = time.monotonic() + 30
    while not run.of(what):
        assert run.process.is_alive(), f"it ended with {run.process.exitcode}"
        assert time.monotonic() < until
        time.sleep(0.005)


def intact_steps(directory: Path) -> list[int]:
    """The steps of all checkpoints, each of which holds its model."""
    opened = CheckpointDirectory(directory)
    opened.open()
    steps = []
    for checkpoint in opened.checkpoints():
        array = np.zeros(3)
        StateDictSaver(weights={"a": array}).restore(checkpoint.prefix)
        assert array.tolist() == [checkpoint.step] * 3
        steps.append(checkpoint.step)
    newest: Any = opened.newest_intact()
    assert newest.step == max(steps)
    opened.close()
    return sorted(steps)


@BACKENDS
@pytest.mark.parametrize(
    ("second", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)],  # 1: by a KeyboardInterrupt
)
def test_a_second_signal_does_what_it_does_without_the_hook(
    tmp_path: Path, backend: str, second: signal.Signals, code: int
) -> None:
    with running(server(), stuck, backend, tmp_path, Connection, "block", 60.0) as run:
        wait_for(run, "stuck")
        run.process.terminate()
        wait_for(run, "logged")
        assert run.process.pid is not None
        time.sleep(0.3)  # longer than signals count as the same
        since = time.monotonic()
        os.kill(run.process.pid, second)
        run.join()
        assert time.monotonic() - since < 5
    assert run.process.exitcode == code
    assert intact_steps(tmp_path) == [0, 2]


@BACKENDS
@pytest.mark.parametrize(
    ("further", "pause_secs"),
    [([signal.SIGTERM] * 3, 0.0), ([signal.SIGINT, signal.SIGUSR1] * 3, 0.1)],
)
def test_signals_that_follow_at_once_are_the_same_and_what_is_trained_is_saved(
    tmp_path: Path, backend: str, further: list[signal.Signals], pause_secs: float
) -> None:
    with running(server(), saving_slowly, backend, tmp_path, Connection) as run:
        wait_for(run, "trained")
        assert run.process.pid is not None
        for number in (signal.SIGTERM, *further):
            os.kill(run.process.pid, number)
            time.sleep(pause_secs)
        run.join()
    assert run.process.exitcode == 143
    assert intact_steps(tmp_path) == [0, 3]


@BACKENDS
@pytest.mark.parametrize(
    ("where", "steps", "logged"),
    [
        ("block", [0, 2, 3], []),
        ("step", [0, 2], ["Saving before the end failed: TimeoutError"]),
        ("save", [0, 2], []),
    ],
)
def test_what_does_not_end_is_ended_at_the_deadline(
    tmp_path: Path, backend: str, where: str, steps: list[int], logged: list[str]
) -> None:
    with running(server(), stuck, backend, tmp_path, Connection, where, 1.0) as run:
        wait_for(run, "stuck")
        run.process.terminate()
        since = time.monotonic()
        if where == "block":
            while (3,) not in run.of("saved"):
                assert time.monotonic() - since < 0.95
                time.sleep(0.005)
            assert time.monotonic() - since > 0.45
        run.join()
        assert 0.95 < time.monotonic() - since < 5
    assert run.process.exitcode == 143
    assert intact_steps(tmp_path) == steps
    messages = [message for (message,) in run.of("logged")]
    assert messages[0].startswith("SIGTERM: training stops")
    assert messages[1] == "The block has not ended for 0.5 s: saving now"
    assert [m for m in messages[2:-1] if not m.startswith(tuple(logged or "-"))] == []
    assert len(messages) == 3 + len(logged)
    assert messages[-1] == "The process did not end within 1 s of SIGTERM: ended"


@BACKENDS
def test_a_session_in_the_main_task_ends_the_process_with_the_signals_code(backend: str) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGUSR1, 138)):
        with running(server(), one, backend, number) as run:
            run.join()
        assert run.process.exitcode == code


WORKERS = """
import sys
import anyio
from asynchooks import FunctionSessionCreator, MonitoredSession, PreemptionHook
from asynchooks import SharedSessionCreator

hook, waiting = PreemptionHook(), ["ready"]
creator = SharedSessionCreator(FunctionSessionCreator(lambda: {"loss": 0.5}))

async def work():
    async with MonitoredSession([hook], creator) as session:
        while not session.should_stop():
            await session.run("loss")
            await anyio.sleep(0.001)
            if session.global_step.value >= 50 and waiting:
                print(waiting.pop(), flush=True)

async def main():
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(work)

try:
    anyio.run(main, backend=sys.argv[1])
except* SystemExit as left:  # trio's groups wrap it
    raise left.exceptions[0]
"""


@pytest.mark.parametrize(
    ("backend", "number", "codes"),
    [
        ("asyncio", signal.SIGTERM, {143}),
        ("asyncio", signal.SIGUSR1, {138}),
        ("trio", signal.SIGTERM, {143}),
        ("asyncio", signal.SIGINT, {130, -signal.SIGINT}),  # a shell says 130 of both
    ],
)
def test_workers_in_a_task_group_end_the_process_with_the_signals_code(
    backend: str, number: int, codes: set[int]
) -> None:
    command = [sys.executable, "-c", WORKERS, backend]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(60) in codes


def test_the_deadline_holds_where_the_output_is_not_read() -> None:
    with running(server(), unread, "asyncio", Connection) as run:
        wait_for(run, "stuck")
        run.process.terminate()
        run.process.join(20)  # without a deadline: for ever
        assert run.process.exitcode == 143
