"""PreemptionHook where something does not end: the process does, in time, with what was saved."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from asynchooks import StateDictSaver

from ..checkpoints.stores import newest_step, opened
from .preempted import stuck, unread
from .programs import running, server

pytestmark = [pytest.mark.timeout(100), pytest.mark.faults]


def intact_steps(directory: Path) -> list[int]:
    """The steps of all checkpoints, each of which holds its model."""
    steps = []
    with opened(directory) as checkpoints:
        for checkpoint in checkpoints.checkpoints():
            array = np.zeros(3)
            StateDictSaver(weights={"a": array}).restore(checkpoint.prefix)
            assert array.tolist() == [checkpoint.step] * 3
            steps.append(checkpoint.step)
    assert newest_step(directory) == max(steps)
    return sorted(steps)


@pytest.mark.parametrize(
    ("backend", "second", "code"),
    # 1: by a KeyboardInterrupt
    [("asyncio", signal.SIGTERM, -signal.SIGTERM), ("trio", signal.SIGINT, 1)],
)
def test_a_second_signal_does_what_it_does_without_the_hook(
    tmp_path: Path, backend: str, second: signal.Signals, code: int
) -> None:
    with running(server(), stuck, backend, tmp_path, Connection, "block", 60.0) as run:
        run.wait_for("stuck")
        run.process.terminate()
        run.wait_for("logged")
        time.sleep(0.3)  # longer than signals count as the same
        since = time.monotonic()
        assert run.process.pid is not None
        os.kill(run.process.pid, second)
        run.join()
        assert time.monotonic() - since < 30, "half of the deadline"
    assert run.process.exitcode == code
    assert intact_steps(tmp_path) == [0, 2]


@pytest.mark.parametrize(
    ("backend", "where", "steps", "logged"),
    [
        ("asyncio", "block", [0, 2, 3], []),
        ("trio", "step", [0, 2], ["Saving before the end failed: TimeoutError"]),
        ("asyncio", "save", [0, 2], []),
    ],
)
def test_what_does_not_end_is_ended_at_the_deadline(
    tmp_path: Path, backend: str, where: str, steps: list[int], logged: list[str]
) -> None:
    with running(server(), stuck, backend, tmp_path, Connection, where, 1.0) as run:
        run.wait_for("stuck")
        run.process.terminate()
        since = time.monotonic()
        if where == "block":
            run.wait_for("saved", 3)
            assert time.monotonic() - since > 0.45
        run.join()
        assert time.monotonic() - since > 0.95
    assert run.process.exitcode == 143
    assert intact_steps(tmp_path) == steps
    messages = [message for (message,) in run.of("logged")]
    expected = ["SIGTERM: training stops", "The block has not ended for 0.5 s: saving now"]
    expected += [*logged, "The process did not end within 1 s of SIGTERM: ended"]
    for message, begin in zip(messages, expected, strict=True):
        assert message.startswith(begin)


def test_the_deadline_holds_where_the_output_is_not_read() -> None:
    with running(server(), unread, "asyncio", Connection) as run:
        run.wait_for("stuck")
        run.process.terminate()
        run.join()  # without a deadline: for ever
    assert run.process.exitcode == 143
