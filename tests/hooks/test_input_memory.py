"""What a pipeline remembers of a long training: no more than may still be asked for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from asynchooks import FeedHook, InputPositionHook, MonitoredSession
from asynchooks.data import Stage, batch, interleave, prefetch, repeat, shard, shuffle
from asynchooks.data._source_stage import SourceStage
from asynchooks.data._stage import TRIM_EVERY

from ..data.sources import Stateful, StatefulSync
from .inputs import Diary

pytestmark = pytest.mark.anyio

NUM_STEPS = 4 * TRIM_EVERY
WIDTHS = {"batches of it": 4, "shard of it": 3}
"""Items of the source for one that is used."""

LONG: dict[str, Callable[[], Stage[Any]]] = {
    "shuffle": lambda: shuffle(range(NUM_STEPS + 9), 9, 1),
    "batches of it": lambda: prefetch(batch(shuffle(range(4 * NUM_STEPS + 9), 5, 1), 4), 2),
    "shard of it": lambda: shard(shuffle(range(3 * NUM_STEPS + 9), 5, 1), 3, 1),
    "interleave": lambda: prefetch(interleave([range(NUM_STEPS), range(NUM_STEPS)]), 3),
    "repeat": lambda: prefetch(repeat([1]), 3),
    "stateful": lambda: prefetch(Stateful(NUM_STEPS + 9), 3),
    "stateful in a thread": lambda: batch(StatefulSync(NUM_STEPS + 9), 1),
}


def num_remembered(source: Stage[Any]) -> int:
    """Entries in the logs of all stages."""
    num = 0
    for stage in source._walk():
        num += len(getattr(stage, "_log", ()))
        num += len(stage._position.states) if isinstance(stage, SourceStage) else 0
    return num


async def items_of(source: Stage[Any], how: str) -> AsyncGenerator[None, None]:
    """Something behind every item that was used."""
    hook = FeedHook(source, "x") if how == "FeedHook" else InputPositionHook(source)
    if how == "a plain loop":
        async with source:
            async for _ in source:
                yield
        return
    async with MonitoredSession([hook], Diary().creator, step_runner="inline") as session:
        if how == "FeedHook":
            while True:
                await session.run([])
                yield
        async for item in session.batches(source):
            await session.run([], {"x": item})
            yield


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("how", ["FeedHook", "session.batches", "a plain loop"])
async def test_long_inputs_leave_no_more_behind_than_a_few_items(kind: str, how: str) -> None:
    source, num, most = LONG[kind](), 0, 0
    async with aclosing(items_of(source, how)) as steps:
        async for _ in steps:
            most = max(most, num_remembered(source))
            num += 1
            if num == NUM_STEPS:
                break
    assert num == NUM_STEPS
    assert 0 < most <= WIDTHS.get(kind, 1) * TRIM_EVERY + 50
