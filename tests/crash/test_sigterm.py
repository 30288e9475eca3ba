"""A process that gets SIGTERM, at whatever moment, saves, and ends as it should."""

from __future__ import annotations

import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from .programs import running, server, train, uninterrupted

pytestmark = pytest.mark.faults

MOMENTS = ["loop", "hook", "step", "wait", "save"] * 5  # on each of the two event loops


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_all_are_saved_and_end_by_their_signal(tmp_path: Path, backend: str) -> None:
    context, rng = server(), random.Random(backend)
    for number, where in enumerate(MOMENTS):
        directory = tmp_path / str(number)
        with running(context, train, directory, backend, Connection, None, where) as run:
            run.has_begun.wait(60)
            time.sleep(rng.random() * 0.3)
            run.process.terminate()
            told_at = time.monotonic()
            run.join()
            assert time.monotonic() - told_at < 20
        assert run.process.exitcode == 128 + signal.SIGTERM
        [(step, num_runs, first)] = run.of("ends")
        assert run.of("saved")[-1] == (step,)
        assert num_runs == step
        assert first == uninterrupted(step)
        with running(context, train, directory, backend, Connection, step + 3) as again:
            again.join()
        assert again.of("begins") == [(step,)]
        assert again.of("ends")[-1][2] == uninterrupted(step + 3)
