"""map_concurrent: what a failure leaves undone, and how little a thread is given at a time."""

from __future__ import annotations

import anyio
import pytest

from asynchooks.data import map_concurrent

from ..afterwards import nothing_left
from ..helpers import settle
from .sources import BadRecordError, Source

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
