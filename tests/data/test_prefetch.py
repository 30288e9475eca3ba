"""prefetch: reads ahead in one task, which also opens and closes what it reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest

from asynchooks.data import batch, prefetch, take

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import BadRecordError, Source, only_on_asyncio, read_all

pytestmark = pytest.mark.anyio


async def test_items_come_in_order_whatever_the_size() -> None:
    for size in (1, 2, 50):
        assert await read_all(prefetch(Source(20).items(), size)) == list(range(20))
        assert await read_all(prefetch(Source(20).items_in_thread(), size)) == list(range(20))
        assert await read_all(prefetch([], size)) == []


async def test_items_before_an_error_are_delivered_first_then_it_stays() -> None:
    error = BadRecordError()
    got: list[int] = []
    async with prefetch(Source(5, error).items(), 9) as items:
        await settle()
        for _ in range(2):
            with pytest.raises(BadRecordError) as caught:
                async for item in items:
                    got.append(item)
            assert caught.value is error
    assert got == [0, 1, 2, 3, 4]


async def test_its_source_is_closed_at_its_end_in_the_task_that_read_it() -> None:
    tasks: list[int] = []

    async def read() -> AsyncIterator[int]:
        try:
            tasks.append(anyio.get_current_task().id)
            yield 0
        finally:
            tasks.append(anyio.get_current_task().id)

    for stage in (prefetch(read(), 2), prefetch(take(read(), 1), 2), prefetch(read(), 1)):
        tasks.clear()
        async with stage:
            await settle()
        assert len(tasks) == 2
        assert tasks[0] == tasks[1] != anyio.get_current_task().id


async def test_it_must_be_opened_and_says_how() -> None:
    for stage, line in (
        (prefetch([1], 1), r"prefetch\(a list of 1\) runs tasks and must be opened"),
        (batch(prefetch([1], 1), 1), r"write: async with batch\(\.\.\.\) as items:"),
        (prefetch([1], 1), r"Got: async for item in prefetch\(\.\.\.\); write: async with prefe"),
    ):
        with pytest.raises(RuntimeError, match=line):
            async for _ in stage:
                pass


@pytest.mark.parametrize("wait_where", ["source", "item"])
async def test_a_cancelled_reader_loses_no_item(wait_where: str) -> None:
    go = anyio.Event()

    async def read() -> AsyncIterator[int]:
        for each in range(4):
            if wait_where == "source":
                await go.wait()
            yield each

    got: list[int] = []
    async with prefetch(read(), 1) as items:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def one() -> None:
                    got.append(await anext(items))

                group.start_soon(one)
                await settle()
                go.set()
                scope.cancel()
        async for item in items:
            got.append(item)
    assert got == [0, 1, 2, 3]


async def test_a_reader_that_is_cancelled_as_it_is_woken_leaves_the_item_to_the_next() -> None:
    send, receive = anyio.create_memory_object_stream[int](9)
    got: list[tuple[int, int]] = []
    scopes: list[anyio.CancelScope] = []

    async def one(name: int) -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            got.append((name, await anext(items)))

    with send, receive:
        async with prefetch(receive, 4) as items, anyio.create_task_group() as group:
            for name in range(3):
                group.start_soon(one, name)
                await settle()
            items._put((7,))  # type: ignore[attr-defined]  # what its task does
            scopes[0].cancel()
            await settle()
            assert got in ([(0, 7)], [(1, 7)])
            send.send_nowait(8)
            send.send_nowait(9)
            send.close()
            await settle()
            group.cancel_scope.cancel()
    assert sorted(item for _, item in got)[:2] == [7, 8]


async def test_an_error_while_closing_leaves_if_there_was_no_other() -> None:
    async def read() -> AsyncIterator[int]:
        try:
            while True:
                yield 0
        finally:
            raise BadRecordError("while closing")

    async with nothing_left():
        with pytest.raises(BadRecordError, match="while closing"):
            async with prefetch(read(), 1) as items:
                await anext(items)


@pytest.mark.parametrize("with_prefetch", [False, True])
async def test_an_error_of_the_loop_is_not_hidden_by_one_while_closing(with_prefetch: bool) -> None:
    async def read() -> AsyncIterator[int]:
        try:
            while True:
                yield 0
        finally:
            raise OSError("while closing")

    with pytest.raises(BadRecordError):
        async with prefetch(read(), 1) if with_prefetch else batch(read(), 1) as items:
            async for _ in items:
                raise BadRecordError


async def test_a_loop_that_never_waits_can_be_cancelled() -> None:
    num = 0
    async with prefetch(Source(None).items(), 2) as items:
        with anyio.CancelScope() as scope:
            async for _ in items:
                num += 1
                scope.cancel()
                assert num < 1000, "never cancelled"


async def test_native_cancellation_of_one_reader_leaves_the_others_theirs(
    anyio_backend_name: str,
) -> None:
    only_on_asyncio(anyio_backend_name)
    queue: asyncio.Queue[int] = asyncio.Queue()
    async with prefetch(queue, 2) as items:
        first, second = (asyncio.create_task(anext(items)) for _ in range(2))
        await settle()
        first.cancel()
        queue.put_nowait(5)
        assert await second == 5
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_an_item_goes_to_the_next_reader_if_the_one_it_woke_is_cancelled(
    anyio_backend_name: str,
) -> None:
    only_on_asyncio(anyio_backend_name)
    queue: asyncio.Queue[int] = asyncio.Queue()
    async with prefetch(queue, 2) as items:
        first, second = (asyncio.create_task(anext(items)) for _ in range(2))
        await settle()
        items._put((5,))  # type: ignore[attr-defined]  # what its task does
        first.cancel()
        assert await asyncio.wait_for(second, 5) == 5
        with pytest.raises(asyncio.CancelledError):
            await first
