"""map_concurrent: what a failure leaves undone, and how little a thread is given at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator

import anyio
import pytest

from asynchooks.data import map_concurrent

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import BadRecordError, Calls, Source

pytestmark = pytest.mark.anyio


async def test_items_that_were_read_and_not_begun_are_left_alone_after_an_error() -> None:
    begun: list[int] = []
    go = anyio.Event()

    async def fn(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise BadRecordError
        await go.wait()
        return item

    async with nothing_left():
        async with map_concurrent(fn, range(9), 3) as stage:
            while 1 not in begun:
                await anyio.lowlevel.checkpoint()
            go.set()
            assert await anext(stage) == 0
            with pytest.raises(BadRecordError):
                await anext(stage)
    assert begun == [0, 1]


async def test_an_item_that_comes_after_an_error_is_left_alone_while_earlier_ones_are_awaited() -> (
    None
):
    calls, go = Calls(), anyio.Event()
    calls.errors[1] = BadRecordError()

    async def source() -> AsyncIterator[int]:
        yield 0
        yield 1
        with anyio.CancelScope(shield=True):
            await go.wait()
        yield 2

    async with map_concurrent(calls.__call__, source(), 9) as stage:
        await settle()
        calls.let(1)
        await settle()
        go.set()
        await settle()
        calls.let(0)
        assert await anext(stage) == 0
        with pytest.raises(BadRecordError):
            await anext(stage)
    assert calls.begun == [0, 1]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_source_that_hangs_is_closed_as_soon_as_a_call_has_failed(ordered: bool) -> None:
    source, go = Source(2, hangs=True), anyio.Event()

    async def fn(item: int) -> int:
        await go.wait()
        raise BadRecordError

    async with map_concurrent(fn, source.items(), 3, ordered) as stage:
        await settle()
        go.set()
        with pytest.raises(BadRecordError):
            await anext(stage)
        await settle()
        assert source.is_closed


async def test_a_thread_that_works_on_several_items_reads_no_more_than_there_is_room() -> None:
    taken = 0
    async with map_concurrent(abs, range(300), 8) as stage:
        async for _ in stage:
            taken += 1
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
                found = stage.statistics()
                assert found.num_buffered <= found.buffer_size == 8
                assert found.sources[0].num_items <= taken + 8
    assert taken == 300


@pytest.mark.parametrize("place", [100, 150])
async def test_a_thread_whose_call_has_failed_takes_no_further_item(place: int) -> None:
    begun: list[tuple[int, int]] = []

    def fn(item: int) -> int:
        begun.append((threading.get_ident(), item))
        if item == place:
            raise BadRecordError
        return item

    got: list[int] = []
    with pytest.raises(BadRecordError):
        async with map_concurrent(fn, range(400), 40) as stage:
            async for item in stage:
                got.append(item)
    assert got == list(range(place))
    failed = next(thread for thread, item in begun if item == place)
    assert max(item for thread, item in begun if thread == failed) == place


async def test_items_behind_one_that_takes_long_go_to_other_threads() -> None:
    is_begun = threading.Event()

    def fn(item: int) -> bool:
        if item == 150:
            return is_begun.wait(5)
        if item > 170:
            is_begun.set()
        until = time.perf_counter() + 1e-4  # so that a thread takes some at a time, but not all
        while time.perf_counter() < until:
            pass
        return True

    async with map_concurrent(fn, range(200), 40) as stage:
        assert all([is_in_time async for is_in_time in stage])


async def test_what_a_plain_function_returns_is_awaited_by_as_many_tasks_as_may_be() -> None:
    calls = Calls()
    with anyio.fail_after(10):
        async with map_concurrent(lambda item: calls(item), range(80), 8) as stage:
            for at in range(0, 80, 8):
                while len(calls.begun) < at + 8:
                    await anyio.lowlevel.checkpoint()
                calls.let(*range(at, at + 8))
                assert [await anext(stage) for _ in range(8)] == list(
                    range(10 * at, 10 * at + 80, 10)
                )
