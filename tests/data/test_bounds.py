"""How far stages read ahead of a slow consumer."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel
import pytest

from asynchooks.data import (
    batch,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    shard,
    shuffle,
    take,
)

from ..support.helpers import settle
from .sources import Source, same, same_in_thread

pytestmark = pytest.mark.anyio


# a stage, and how many items of the source are read when `taken` of its own were taken
BOUNDS: dict[str, tuple[Any, Any]] = {
    "prefetch": (lambda source: prefetch(source, 3), lambda taken: taken + 3),
    "prefetch of one": (lambda source: prefetch(source, 1), lambda taken: taken + 1),
    "batch": (lambda source: batch(source, 3), lambda taken: 3 * taken),
    "shuffle": (lambda source: shuffle(source, 4, 1), lambda taken: taken + 3 if taken else 0),
    "shard": (
        lambda source: shard(source, 3, 1),
        lambda taken: 3 * (taken - 1) + 2 if taken else 0,
    ),
    "take": (lambda source: take(source, 2), lambda taken: min(taken, 2)),
    "repeat": (lambda source: repeat(source, 1), lambda taken: taken),
    "interleave": (lambda source: interleave([source, [0] * 9]), lambda taken: (taken + 1) // 2),
    "map": (lambda source: map_concurrent(same, source, 3), lambda taken: taken + 3),
    "unordered map": (
        lambda source: map_concurrent(same, source, 3, ordered=False),
        lambda taken: taken + 3,
    ),
    "all": (
        lambda source: prefetch(batch(map_concurrent(same, prefetch(source, 2), 3), 2), 2),
        lambda taken: 2 * (taken + 2) + 3 + 2,
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
async def test_a_slow_consumer_stops_the_producers(name: str) -> None:
    make, bound = BOUNDS[name]
    source = Source(None)
    async with make(source.items()) as items:
        for taken in range(5):
            await settle()
            assert source.num_read == bound(taken)
            if name == "take" and taken >= 2:
                break
            await anext(items)


@pytest.mark.parametrize("name", BOUNDS)
async def test_a_slow_consumer_stops_the_threads(name: str) -> None:
    make, bound = BOUNDS[name]
    source = Source(None)
    async with make(source.items_in_thread()) as items:
        for taken in range(1, 6):
            if name == "take" and taken > 2:
                break
            await anext(items)
            await anyio.lowlevel.checkpoint()
            assert source.num_read <= bound(taken)


async def test_map_in_threads_begins_no_more_than_its_concurrency() -> None:
    source = Source(None)
    async with map_concurrent(same_in_thread, source.items(), 3) as items:
        for taken in range(1, 6):
            await anext(items)
            await settle()
            assert source.num_read <= taken + 3


async def test_a_stage_that_nobody_reads_reads_nothing_but_ahead() -> None:
    source = Source(None)
    async with batch(shuffle(source.items(), 3, 0), 2):
        await settle()
    assert source.num_read == 0
