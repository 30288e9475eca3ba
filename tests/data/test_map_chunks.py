"""map_concurrent in threads: what is done is given out although its thread goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from asynchooks._engine.current import current_engine
from asynchooks.data import map_concurrent
from asynchooks.data._map import Chunk, Work

from ..support.afterwards import nothing_left
from .sources import read_all

pytestmark = pytest.mark.anyio

SLOW_EVERY = 40
"""Every so many items comes one whose call lasts until the item before it was given out."""


class Given:
    """What the consumer has got, for calls that wait for it."""

    def __init__(self, num_items: int) -> None:
        self.gates = [threading.Event() for _ in range(num_items)]

    def call(self, item: int) -> tuple[int, bool]:
        """The item, and whether the one before it was given out in time."""
        return item, item % SLOW_EVERY > 0 or item == 0 or self.gates[item - 1].wait(2)

    def items(self, waits: bool) -> Iterator[int]:
        yield from range(len(self.gates))
        if waits:
            self.gates[-1].wait(10)


@pytest.mark.parametrize("concurrency", [2, 8, 40])
@pytest.mark.parametrize("ordered", [True, False])
async def test_a_result_is_given_out_though_its_thread_has_gone_on_to_a_slow_item(
    ordered: bool, concurrency: int
) -> None:
    given = Given(800)
    late, got = [], []
    async with (
        nothing_left(),
        map_concurrent(given.call, range(800), concurrency, ordered) as stage,
    ):
        async for item, is_in_time in stage:
            given.gates[item].set()
            got.append(item)
            late += [] if is_in_time else [item]
    assert late == []
    assert (got if ordered else sorted(got)) == list(range(800))


@pytest.mark.parametrize("waits", [True, False])
async def test_a_result_is_given_out_though_no_further_item_comes(waits: bool) -> None:
    for num_items in range(41, 801, SLOW_EVERY):
        given, late = Given(num_items), []
        async with map_concurrent(given.call, given.items(waits), 8) as stage:
            async for item, is_in_time in stage:
                given.gates[item].set()
                late += [] if is_in_time else [item]
        assert late == []


async def test_calls_that_wait_for_each_other_in_pairs_never_stand_still() -> None:
    both = threading.Barrier(2)

    def fn(item: int) -> int:
        both.wait(5)
        return item

    for _ in range(5):
        assert await read_all(map_concurrent(fn, range(100), 2)) == list(range(100))


async def test_a_function_whose_later_results_are_awaitables_has_them_awaited() -> None:
    async def later(item: int) -> int:
        await anyio.lowlevel.checkpoint()
        return item

    fn: Callable[[int], Any] = lambda item: item if item < 100 else later(item)  # noqa: E731
    assert await read_all(map_concurrent(fn, range(200), 40)) == list(range(200))


@pytest.mark.parametrize("takes_more", [True, False])
async def test_a_chunk_takes_what_is_left_only_where_it_may(takes_more: bool) -> None:
    first, second = Work(1, 0), Work(2, 1)
    left = deque([second])
    chunk = Chunk(current_engine(), first, takes_more)
    chunk.call(lambda item: -item, left)
    assert [work.result for work in chunk.done] == ([-1, -2] if takes_more else [-1])
    assert chunk.num_done == len(chunk.done)
    assert not chunk.holds_back, "the thread is about to hand it over"
