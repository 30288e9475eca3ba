"""The position in long inputs, where stages forget what is not needed any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest

from asynchooks import FeedHook, MonitoredSession, SharedSessionCreator
from asynchooks.data import Stage, batch, prefetch, shuffle
from asynchooks.data._stage import TRIM_EVERY

from .inputs import Diary

pytestmark = pytest.mark.anyio


class Stateful:
    """An iterator whose position is its own affair."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


LONG: dict[str, Callable[[], Stage[Any]]] = {
    "shuffled": lambda: prefetch(batch(shuffle(range(2000), 9, seed=1), 2), 3),
    "stateful": lambda: prefetch(Stateful(), 3),
    "stateful, not prefetched": lambda: batch(Stateful(), 1),
}


async def first_of(hook: FeedHook) -> list[int]:
    diary = Diary()
    async with MonitoredSession([hook], diary.creator) as session:
        await session.run([])
    return diary.items


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *((kind, 1) for kind in LONG),
        *((kind, 2) for kind in list(LONG)[1:]),
        ("shuffled", 2),
    ],
)
async def test_it_is_kept_as_far_back_as_the_first_item_that_is_not_used(
    kind: str, num_workers: int
) -> None:
    """A second worker has an item in hand that it got after the first 100."""
    source, diary = LONG[kind](), Diary()
    creator = SharedSessionCreator(diary.creator)
    hook, other = FeedHook(source, "x"), FeedHook(source, "x")
    states: dict[int, Any] = {}
    async with (
        MonitoredSession([hook], creator) as session,
        MonitoredSession([other], creator) as b,
    ):
        for number in range(1, 2 * TRIM_EVERY + 6):
            await session.run([])
            if abs(number - TRIM_EVERY) < 3 or abs(number - 2 * TRIM_EVERY) < 3:
                states[number] = hook.state_dict()
            if number == 100 and num_workers == 2:
                with pytest.raises(ValueError, match="unknown"):
                    await b.run([], {"unknown": 1})
    for number, state in states.items():
        assert kind == "shuffled" or "'state'" in repr(state), "its own, and not a count"
        again = FeedHook(LONG[kind](), "x")
        again.load_state_dict(state)
        found = await first_of(again)
        if num_workers == 1:
            size = len(found)
            assert found == diary.items[number * size : (number + 1) * size]
        else:
            assert not set(found) & set(diary.items), "the item in hand comes first"


@pytest.mark.parametrize("kind", list(LONG))
async def test_the_position_after_items_of_a_former_life_is_that_of_the_next(kind: str) -> None:
    async with LONG[kind]() as items:
        await anext(items)
        begin = items.state_dict()
        expected = [await anext(items) for _ in range(21)]
    hook, diary = FeedHook(LONG[kind](), "x"), Diary()
    hook.load_state_dict({**begin, "used_beyond": list(range(1, 20))})
    async with MonitoredSession([hook], diary.creator) as session:
        await session.run([])
        state = hook.state_dict()
    again = FeedHook(LONG[kind](), "x")
    again.load_state_dict(state)
    found = await first_of(again)
    assert found == [int(each) for each in np.ravel(expected[20])]
