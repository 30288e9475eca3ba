"""What a pipeline remembers of a long training: no more than somebody may still ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynchooks import FeedHook, InputPositionHook, MonitoredSession
from asynchooks.data import Stage, batch, interleave, prefetch, repeat, shuffle
from asynchooks.data._stage import KEEP_EVERY

from ..data.sources import Stateful, StatefulSync
from .inputs import Diary

pytestmark = pytest.mark.anyio

NUM_STEPS = 6 * KEEP_EVERY

LONG: dict[str, Callable[[], Stage[Any]]] = {
    "shuffle": lambda: shuffle(range(NUM_STEPS + 9), 9, 1),
    "interleave": lambda: prefetch(interleave([range(NUM_STEPS), range(NUM_STEPS)]), 3),
    "repeat": lambda: prefetch(repeat([1]), 3),
    "stateful": lambda: prefetch(Stateful(NUM_STEPS + 9), 3),
    "stateful in a thread": lambda: batch(StatefulSync(NUM_STEPS + 9), 1),
}


def num_remembered(source: Stage[Any]) -> int:
    """Entries in the logs of all stages."""
    num = 0
    for stage in source._walk():
        for each in (stage, getattr(stage, "_reading", None)):
            num += sum(len(getattr(each, name, ())) for name in ("_log", "_states", "states"))
    return num


@pytest.mark.parametrize("kind", LONG)
async def test_thousands_of_steps_leave_no_more_behind_than_a_few(kind: str) -> None:
    source, most = LONG[kind](), 0
    hook = FeedHook(source, "x")
    async with MonitoredSession([hook], Diary().creator, step_runner="inline") as session:
        for _ in range(NUM_STEPS):
            await session.run([])
            most = max(most, num_remembered(source))
    assert 0 < most <= KEEP_EVERY + 20
