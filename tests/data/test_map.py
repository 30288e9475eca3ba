"""map_concurrent: several items at a time, in tasks or in threads, never more than it may have."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks.data import map_concurrent

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import Calls, read_all

pytestmark = pytest.mark.anyio


async def test_calls_overlap_and_results_keep_the_order_of_items() -> None:
    calls = Calls()
    got: list[int] = []

    async def read() -> None:
        async for item in stage:
            got.append(item)

    async with map_concurrent(calls.__call__, range(5), 3) as stage:
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await settle()
            assert calls.begun == [0, 1, 2]
            calls.let(2, 1)
            await settle()
            assert got == []
            assert calls.begun == [0, 1, 2]  # those that are done count
            calls.let(0)
            await settle()
            assert got == [0, 10, 20]
            assert calls.begun == [0, 1, 2, 3, 4]
            calls.let(3, 4)
    assert got == [0, 10, 20, 30, 40]


async def test_results_without_order_come_as_they_are_done() -> None:
    calls = Calls()
    async with map_concurrent(calls.__call__, range(4), 2, ordered=False) as stage:
        await settle()
        calls.let(1)
        assert await anext(stage) == 10
        await settle()
        assert calls.begun == [0, 1, 2]
        calls.let(2, 0)
        await settle()
        calls.let(*calls.begun)
        assert sorted([await anext(stage), await anext(stage)]) == [0, 20]
        await settle()
        calls.let(3)
        assert await anext(stage) == 30
        with pytest.raises(StopAsyncIteration):
            await anext(stage)


async def test_a_plain_function_runs_in_several_threads_at_once() -> None:
    both = threading.Barrier(2)
    threads: set[int] = set()

    def work(item: int) -> int:
        threads.add(threading.get_ident())
        both.wait(10)
        return -item

    async with nothing_left():
        assert await read_all(map_concurrent(work, range(4), 2)) == [0, -1, -2, -3]
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_a_thread_that_was_given_one_item_gives_it_out_before_it_begins_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_map._CHUNK_SECS", "_map._STEAL_SECS"):
        monkeypatch.setattr(f"asynchooks.data.{name}", 10)
    may_end = {1: threading.Event(), 2: threading.Event()}

    def work(item: int) -> int:
        assert item == 0 or may_end[item].wait(3)
        return item

    async with map_concurrent(work, range(3), 2) as stage:
        assert await anext(stage) == 0
        await settle()
        assert stage.statistics().sources[0].num_items == 3, "there is another one"
        may_end[1].set()
        assert await anext(stage) == 1
        may_end[2].set()
        assert await anext(stage) == 2


async def test_a_function_that_returns_an_awaitable_is_awaited() -> None:
    async def double(item: int, by: int) -> int:
        return by * item

    for fn in (partial(double, by=2), lambda item: double(item, 2)):
        assert await read_all(map_concurrent(fn, range(3), 2)) == [0, 2, 4]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)
@given(
    num_items=st.integers(0, 20),
    concurrency=st.integers(1, 5),
    ordered=st.booleans(),
    waits=st.lists(st.integers(0, 4), min_size=20, max_size=20),
    pauses=st.lists(st.integers(0, 3), min_size=20, max_size=20),
)
async def test_it_never_holds_more_than_its_concurrency(
    num_items: int, concurrency: int, ordered: bool, waits: list[int], pauses: list[int]
) -> None:
    num_held = 0
    most = 0
    got: list[int] = []

    async def read() -> AsyncIterator[int]:
        nonlocal num_held, most
        for each in range(num_items):
            num_held += 1
            most = max(most, num_held)
            yield each

    async def wait(item: int) -> int:
        for _ in range(waits[item]):
            await anyio.lowlevel.checkpoint()
        return item

    async with map_concurrent(wait, read(), concurrency, ordered) as stage:
        async for item in stage:
            num_held -= 1
            got.append(item)
            for _ in range(pauses[item]):
                await anyio.lowlevel.checkpoint()
    assert (got if ordered else sorted(got)) == list(range(num_items))
    assert most <= concurrency


def test_bad_arguments_say_what_to_give() -> None:
    with pytest.raises(TypeError, match="fn is 3; give a function that takes an item"):
        map_concurrent(3, [1], 1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="concurrency is 0; give an integer >= 1"):
        map_concurrent(str, [1], 0)


async def test_statistics_tell_how_many_it_holds() -> None:
    calls: Any = Calls()
    async with map_concurrent(calls.__call__, range(9), 3) as stage:
        await settle()
        found = stage.statistics()
        assert (found.num_buffered, found.buffer_size, found.num_items) == (3, 3, 0)
