"""The position in the input in checkpoints of several workers: all lives together lose nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import FeedHook, MonitoredSession, SharedSessionCreator, StopAtStepHook
from asynchooks.data import Stage, prefetch

from .inputs import SHORT_SECS, Diary, saving

pytestmark = pytest.mark.anyio


class CrashError(Exception):
    """Ends a life without a last checkpoint."""


async def live_with_workers(
    path: Path, source: Stage[Any], num_workers: int, last_step: int | None, crash_at: int
) -> Diary:
    diary = Diary({crash_at: CrashError()} if crash_at else {})
    creator = SharedSessionCreator(diary.creator)

    async def worker(place: int) -> None:
        hooks: list[Any] = [FeedHook(source, "x")]
        hooks += [saving(path, diary)] if place == 0 else []
        hooks += [StopAtStepHook(last_step=last_step)] if last_step else []
        try:
            async with MonitoredSession(hooks, creator, step_runner="inline") as session:
                opened[place].set()
                for each in opened:
                    await each.wait()
                while not session.should_stop():
                    await session.run([])
                    await anyio.lowlevel.checkpoint()
        except CrashError:
            pass

    opened = [anyio.Event() for _ in range(num_workers)]
    with anyio.fail_after(SHORT_SECS):
        async with anyio.create_task_group() as group:
            for place in range(num_workers):
                group.start_soon(worker, place)
    return diary


@pytest.mark.parametrize("seed", range(4))
async def test_workers_of_several_lives_lose_nothing_and_use_nothing_twice(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    last_step = 0
    for _ in range(4):
        last_step += draw.randrange(3, 9)
        source = prefetch(range(80), draw.randrange(1, 9))
        crash_at = draw.choice([0, draw.randrange(2, 8)])
        await live_with_workers(tmp_path, source, 4, last_step, crash_at)
    last = await live_with_workers(tmp_path, prefetch(range(80), 2), 4, None, 0)
    assert sorted(last.items) == list(range(80))
