"""Training that is killed at random moments goes on from its last completed checkpoint."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from .programs import running, server, train, uninterrupted

pytestmark = pytest.mark.faults

KILLS = 100  # on each of the two event loops
LONGEST_SECS = 0.3


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_every_restart_finds_the_last_completed_save_or_a_newer_one(
    tmp_path: Path, backend: str
) -> None:
    context, rng = server(), random.Random(backend)
    saved = -1
    num_resumed = 0
    for _ in range(KILLS):
        with running(context, train, tmp_path, backend, Connection, None) as run:
            # at some moment: while it opens and restores, or between, or in its steps and saves
            if rng.random() < 0.8:
                run.has_begun.wait(60)
            time.sleep(rng.random() * LONGEST_SECS)
            run.process.kill()
        for (step,) in run.of("begins"):
            assert step >= saved
            num_resumed += step > 0
        saved = max([saved, *(step for (step,) in run.of("saved"))])
        assert not run.of("ends")
    assert num_resumed > KILLS // 2
    last_step = saved + 20
    with running(context, train, tmp_path, backend, Connection, last_step) as run:
        run.join()
    [(step, num_runs, number)] = run.of("ends")
    assert step == num_runs == last_step
    assert number == uninterrupted(last_step)
