"""Workers that share an input are killed, and go on: each item is used once."""

import random
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from asynchooks.checkpoints import CheckpointDirectory

from .programs import kill_at_random, running, server
from .workers import MAX_ITEMS, Policy, train_together

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

IMPORTED = [
    train_together.__module__, "asynchooks.checkpoints", "asynchooks.hooks",
    "anyio._backends._asyncio", "anyio._backends._trio",
]  # fmt: skip
"""Before processes are forked: it takes longer than a life."""


@pytest.mark.parametrize(
    ("loop", "kind"),
    [("asyncio", "fed"), ("trio", "loop"), ("uvloop", "dropped"), ("trio", "rollouts")],
)
def test_each_item_is_trained_with_once_or_counted_after_kills(
    tmp_path: Path, loop: str, kind: str
) -> None:
    context, rng, args = server(*IMPORTED), random.Random(loop), (loop, tmp_path, Connection, kind)
    kill_at_random(context, rng, 8, 0.1, train_together, lambda life: (*args, life, MAX_ITEMS))
    policy, newest = Policy(), CheckpointDirectory(tmp_path).newest_intact()
    assert newest is not None
    policy.saver.restore(newest.prefix)
    num_items = 200 + policy.items[-1]
    with running(context, train_together, *args, -1, num_items) as run:
        run.join()
    assert run.of("fails") == []
    [(items, num_reported)] = run.of("ends")
    assert set(items) <= set(range(num_items))
    assert len(items) + num_reported == num_items
