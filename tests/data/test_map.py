"""map_concurrent: several items at a time, in tasks or threads; its failures and ends."""

import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from asynchooks.data import map_concurrent

from ..support.afterwards import nothing_left
from ..support.helpers import in_task, settle, turns
from .sources import BadRecordError, Calls, read_all


async def test_calls_overlap_and_results_keep_the_order_of_items() -> None:
    calls = Calls()
    async with map_concurrent(calls.__call__, range(5), 3) as stage:
        await settle()
        assert calls.begun == [0, 1, 2]
        found = stage.statistics()
        assert (found.num_buffered, found.buffer_size, found.num_items) == (3, 3, 0)
        async with in_task(anext, stage) as first:
            calls.let(2, 1)
            await settle()
            assert (first.value, calls.begun) == (None, [0, 1, 2]), "those that are done count"
            calls.let(0)
        got = [first.value, await anext(stage), await anext(stage)]
        await settle()
        assert (got, calls.begun) == ([0, 10, 20], [0, 1, 2, 3, 4])
        calls.let(3, 4)
        assert [item async for item in stage] == [30, 40]


async def test_results_without_order_come_as_they_are_done() -> None:
    calls, got = Calls(), []
    async with map_concurrent(calls.__call__, range(4), 2, ordered=False) as stage:
        for item in (1, 2, 0, 3):
            await settle()
            calls.let(item)
            got.append(await anext(stage))
        with pytest.raises(StopAsyncIteration):
            await anext(stage)
    assert (got, calls.begun) == ([10, 20, 0, 30], [0, 1, 2, 3])


async def test_a_plain_function_runs_in_several_threads_at_once_and_none_stands_still() -> None:
    both, threads = threading.Barrier(2), set[int]()

    def work(item: int) -> int:
        threads.add(threading.get_ident())
        both.wait(5)  # calls wait for each other in pairs
        return -item

    async with nothing_left():
        assert await read_all(map_concurrent(work, range(100), 2)) == [-each for each in range(100)]
    assert len(threads - {threading.get_ident()}) == 2


async def double(item: int, by: int) -> int:
    await turns()
    return by * item


@pytest.mark.parametrize(
    "fn",
    [
        partial(double, by=2),
        lambda item: double(item, 2),
        lambda item: 2 * item if item < 100 else double(item, 2),
    ],
)
@pytest.mark.parametrize("concurrency", [2, 40])
async def test_a_function_that_returns_awaitables_always_or_later_has_them_awaited(
    fn: Callable[[int], Any], concurrency: int
) -> None:
    expected = [2 * item for item in range(200)]
    assert await read_all(map_concurrent(fn, range(200), concurrency)) == expected


async def test_an_early_error_waits_for_earlier_items_and_cancels_later_ones() -> None:
    calls = Calls()
    calls.errors[1] = BadRecordError()
    async with map_concurrent(calls.__call__, range(9), 3) as stage:
        await settle()
        calls.let(1)
        await settle()
        assert sorted(calls.ended) == [1, 2]
        calls.let(0)
        assert await anext(stage) == 0
        with pytest.raises(BadRecordError):
            await anext(stage)
        assert calls.begun == [0, 1, 2]


async def test_items_that_were_read_and_not_begun_are_left_alone_after_an_error() -> None:
    begun, go = list[int](), anyio.Event()

    async def fn(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise BadRecordError
        await go.wait()
        return item

    async with map_concurrent(fn, range(9), 3) as stage:
        await settle()
        go.set()
        assert await anext(stage) == 0
        with pytest.raises(BadRecordError):
            await anext(stage)
    assert begun == [0, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
async def test_an_exit_of_the_process_waits_for_no_earlier_item(error: BaseException) -> None:
    calls = Calls()
    calls.errors[2] = error
    async with nothing_left():
        async with map_concurrent(calls.__call__, range(9), 3) as stage:
            for item in (0, 2):
                await settle()
                calls.let(item)
            await settle()
            assert await anext(stage) == 0, "it was ready"
            with pytest.raises(type(error)) as caught:
                await anext(stage)
    assert caught.value is error
    assert calls.begun == [0, 1, 2]


async def test_leaving_never_hangs_as_an_item_is_about_to_begin() -> None:
    go = anyio.Event()

    async def read() -> AsyncIterator[int]:
        yield 0
        with anyio.CancelScope(shield=True):
            await go.wait()
        while True:
            yield 1

    async def let_go() -> None:
        await settle()  # the block is being left
        go.set()

    async with nothing_left(), anyio.create_task_group() as group:
        async with map_concurrent(Calls().__call__, read(), 3):
            await settle()
            group.start_soon(let_go)
