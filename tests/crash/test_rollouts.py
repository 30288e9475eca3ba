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

from asynchooks.checkpoints import CheckpointDirectory, StateDictSaver

from ..support.loops import LOOPS
from .programs import kill_at_random, running, server
from .rollouts import Policy, generate_in_sandboxes, train_on_rollouts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

IMPORTED = [
    train_on_rollouts.__module__, "asynchooks.checkpoints", "asynchooks.hooks",
    "anyio._backends._asyncio", "anyio._backends._trio",
]  # fmt: skip
"""Before processes are forked: it takes longer than a life."""


@pytest.mark.parametrize(
    ("loop", "drops"), [("asyncio", False), ("uvloop", True), ("trio", False), ("trio", True)]
)
def test_each_item_is_trained_with_once_or_counted_after_kills(
    tmp_path: Path, loop: str, drops: bool
) -> None:
    context, rng, args = server(*IMPORTED), random.Random(loop), (loop, tmp_path, Connection)
    kill_at_random(
        context, rng, 25, 0.15, train_on_rollouts, lambda life: (*args, life, drops, 100_000)
    )
    policy, newest = Policy(), CheckpointDirectory(tmp_path).newest_intact()
    assert newest is not None
    StateDictSaver(arrays=policy.arrays).restore(newest.prefix)
    num_items = 200 + int(policy.arrays["top"][0])
    with running(context, train_on_rollouts, *args, -1, drops, num_items) as run:
        run.join()
    assert run.of("fails") == []
    [(data, num_reported, position)] = run.of("ends")
    counts = np.frombuffer(data, np.int8)
    assert counts.max() == 1
    assert int(counts.sum()) + num_reported == num_items
    assert not counts[num_items:].any()
    assert (position["place"], position["beyond"]) == (num_items, [])
    assert drops or num_reported == 0


@pytest.mark.parametrize("loop", ["asyncio.run", *LOOPS])
def test_ctrl_c_leaves_no_sandbox_behind(tmp_path: Path, loop: str) -> None:
    context, rng, num_open = server(*IMPORTED), random.Random(loop), 0
    for life in range(4):
        directory = tmp_path / str(life)
        directory.mkdir()
        with running(context, generate_in_sandboxes, loop, directory, Connection, life) as run:
            run.has_begun.wait(60)
            time.sleep(0.02 + rng.random() * 0.1)
            num_open += len(list(directory.iterdir()))
            assert run.process.pid is not None
            os.kill(run.process.pid, signal.SIGINT)
            run.join()
        assert (run.of("fails"), run.of("interrupted")) == ([], [()])
        assert list(directory.iterdir()) == []
    assert num_open > 4 * 20
