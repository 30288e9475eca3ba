"""Training on rollouts that is killed goes on from its last save; Ctrl-C leaves no sandbox."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from ..support.loops import LOOPS
from .programs import running, server
from .rollouts import generate_in_sandboxes, train_on_rollouts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

NUM_KILLS = {"asyncio": (35, 33), "uvloop": (33, 33), "trio": (33, 33)}
"""200 in all: under WAIT, and under DROP with refused results."""


IMPORTED = [
    train_on_rollouts.__module__, "asynchooks.checkpoints", "asynchooks.hooks",
    "anyio._backends._asyncio", "anyio._backends._trio",
]  # fmt: skip
"""Before processes are forked: it takes longer than a life."""


@pytest.mark.parametrize("drops", [False, True], ids=["wait", "drop"])
@pytest.mark.parametrize("loop", LOOPS)
def test_each_item_is_trained_with_once_or_counted_after_kills(
    tmp_path: Path, loop: str, drops: bool
) -> None:
    context, rng = server(*IMPORTED), random.Random(f"{loop} {drops}")
    saved = top = num_resumed = 0
    num_kills = NUM_KILLS[loop][drops]
    for life in range(num_kills):
        args = loop, tmp_path, Connection, life, drops, 100_000
        with running(context, train_on_rollouts, *args) as run:
            if rng.random() < 0.8:
                run.has_begun.wait(60)
            time.sleep(rng.random() * 0.15)
            run.process.kill()
        assert run.of("fails") == run.of("ends") == []
        for (step,) in run.of("begins"):
            assert step >= saved
            num_resumed += step > 0
        saved = max([saved, *(step for (step,) in run.of("saved"))])
        top = max([top, *(place for (place,) in run.of("top"))])
    assert num_resumed > num_kills // 2
    num_items = top + 200
    with running(
        context, train_on_rollouts, loop, tmp_path, Connection, -1, drops, num_items
    ) as run:
        run.join()
    assert run.of("fails") == []
    [(data, num_reported, position)] = run.of("ends")
    counts = np.frombuffer(data, np.int8)
    assert counts.max() == 1
    assert int(counts.sum()) + num_reported == num_items
    assert not counts[num_items:].any()
    assert (position["place"], position["beyond"]) == (num_items, [])
    if not drops:
        assert num_reported == 0


@pytest.mark.parametrize("loop", ["asyncio.run", *LOOPS])
def test_ctrl_c_leaves_no_sandbox_behind(tmp_path: Path, loop: str) -> None:
    context, rng = server(*IMPORTED), random.Random(loop)
    num_open = 0
    for life in range(10):
        directory = tmp_path / str(life)
        directory.mkdir()
        with running(context, generate_in_sandboxes, loop, directory, Connection, life) as run:
            run.has_begun.wait(60)
            time.sleep(0.02 + rng.random() * 0.1)
            num_open += len(list(directory.iterdir()))
            assert run.process.pid is not None
            os.kill(run.process.pid, signal.SIGINT)
            begin = time.monotonic()
            run.join()
            assert time.monotonic() - begin < 5
        assert run.of("fails") == []
        assert run.of("interrupted") == [()]
        assert list(directory.iterdir()) == []
    assert num_open > 10 * 20
