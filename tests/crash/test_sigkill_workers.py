"""Eight workers on one model that are killed at random moments train each item exactly once."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from .programs import running, server
from .workers import MAX_ITEMS, CountingModel, train_together

pytestmark = pytest.mark.faults

KILLS = 50
LONGEST_SECS = 0.2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("feeds", [True, False], ids=["feed", "loop"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_each_item_is_trained_once_after_fifty_kills(
    tmp_path: Path, backend: str, feeds: bool
) -> None:
    context, rng = server(train_together.__module__), random.Random(f"{backend}, {feeds}")
    saved = -1
    num_resumed = 0
    for _ in range(KILLS):
        with running(
            context, train_together, tmp_path, backend, Connection, MAX_ITEMS, feeds
        ) as run:
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
    num_items = saved + 100
    with running(context, train_together, tmp_path, backend, Connection, num_items, feeds) as run:
        run.join()
    [(state,)] = run.of("ends")
    assert state == CountingModel().after(num_items).state
