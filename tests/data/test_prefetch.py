"""prefetch: one task reads ahead, within bounds; several may wait for its items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks.data import (
    Stage,
    batch,
    chain,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    shard,
    shuffle,
    take,
)
from asynchooks.data._prefetch import Taken

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import BadRecordError, Source, on_asyncio, same, same_in_thread

pytestmark = pytest.mark.anyio


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


@pytest.mark.parametrize(
    "make",
    [
        lambda source: prefetch(source, 2),
        lambda source: prefetch(batch(source, 1), 2),
        lambda source: map_concurrent(same, source, 2),
    ],
    ids=["prefetch", "batch", "map"],
)
async def test_an_error_of_its_clean_up_leaves_where_a_read_of_the_source_is_cancelled(
    make: Callable[[Any], Stage[Any]],
) -> None:
    async def read() -> AsyncIterator[int]:
        try:
            yield 0
            await anyio.sleep_forever()
        finally:
            raise OSError("the file cannot be closed")

    with pytest.raises(OSError, match="the file cannot be closed"):
        async with make(read()) as items:
            await anext(items)
            await settle()
    with pytest.raises(KeyError) as caught:
        async with make(read()) as items:
            await settle()
            raise KeyError("of the block")
    assert "the file cannot be closed" in str(caught.value.__notes__)


@pytest.mark.parametrize(
    "make", [lambda source: prefetch(source, 2), lambda source: map_concurrent(same, source, 2)]
)
async def test_an_error_of_the_clean_up_in_a_task_of_its_source_leaves_as_a_group(
    make: Callable[[Any], Stage[Any]],
) -> None:
    async def hold() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("the file cannot be closed")

    async def read() -> AsyncIterator[int]:
        yield 0
        async with anyio.create_task_group() as group:
            group.start_soon(hold)
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        async with make(read()) as items:
            await anext(items)
            await settle()
    assert repr(caught.value.exceptions) == "(OSError('the file cannot be closed'),)"


async def test_a_task_of_its_source_that_failed_before_the_closing_raises_nothing_there() -> None:
    held, released = anyio.Event(), anyio.Event()

    async def fail() -> None:
        raise ValueError("of item 1, which nothing takes")

    async def hold() -> None:
        with anyio.CancelScope(shield=True):
            held.set()
            await released.wait()

    async def read() -> AsyncIterator[int]:
        yield 0
        async with anyio.create_task_group() as group:
            group.start_soon(hold)
            await held.wait()
            group.start_soon(fail)
            await anyio.sleep_forever()

    async def release() -> None:
        await settle()  # the stage is being closed by then
        released.set()

    async with anyio.create_task_group() as group, prefetch(read(), 2) as items:
        await anext(items)
        await settle()
        group.start_soon(release)


async def test_it_must_be_opened_and_says_how() -> None:
    for stage, line in (
        (prefetch([1], 1), r"prefetch\(a list of 1\) runs tasks and must be opened"),
        (batch(prefetch([1], 1), 1), r"write: async with batch\(\.\.\.\) as items:"),
        (prefetch([1], 1), r"Got: async for item in prefetch\(\.\.\.\); write: async with prefe"),
    ):
        with pytest.raises(RuntimeError, match=line):
            async for _ in stage:
                pass


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
            items._put((Taken(7),))  # type: ignore[attr-defined]  # what its task does
            scopes[0].cancel()
            await settle()
            assert got in ([(0, 7)], [(1, 7)])
            send.send_nowait(8)
            send.send_nowait(9)
            send.close()
            await settle()
            group.cancel_scope.cancel()
    assert sorted(item for _, item in got)[:2] == [7, 8]


async def test_a_loop_that_never_waits_can_be_cancelled() -> None:
    num = 0
    async with prefetch(Source(None).items(), 2) as items:
        with anyio.CancelScope() as scope:
            async for _ in items:
                num += 1
                scope.cancel()
                assert num < 1000, "never cancelled"


@on_asyncio
@pytest.mark.parametrize("is_woken", [False, True])
async def test_native_cancellation_of_one_reader_leaves_the_item_to_the_other(
    is_woken: bool,
) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    async with prefetch(queue, 2) as items:
        first, second = (asyncio.create_task(anext(items)) for _ in range(2))
        await settle()
        if is_woken:
            items._put((Taken(5),))  # type: ignore[attr-defined]  # what its task does
        else:
            queue.put_nowait(5)
        first.cancel()
        assert await asyncio.wait_for(second, 5) == 5
        with pytest.raises(asyncio.CancelledError):
            await first


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
    "map in threads": (
        lambda source: map_concurrent(same_in_thread, source, 3),
        lambda taken: taken + 3,
    ),
    "all": (
        lambda source: prefetch(batch(map_concurrent(same, prefetch(source, 2), 3), 2), 2),
        lambda taken: 2 * (taken + 2) + 3 + 2,
    ),
}


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
@pytest.mark.parametrize("name", BOUNDS)
async def test_a_slow_consumer_stops_the_producers(name: str, kind: str) -> None:
    make, bound = BOUNDS[name]
    source = Source(None)
    async with make(getattr(source, kind)()) as items:
        for taken in range(5):
            await settle()
            assert source.num_read <= bound(taken)
            if kind == "items" and name != "map in threads":  # else a thread may not be so far yet
                assert source.num_read == bound(taken)
            if name == "take" and taken >= 2:
                break
            await anext(items)


async def read_one(stage: Stage[Any], got: list[Any]) -> None:
    """Take one item; 'end' stands for the end."""
    got.append(await anext(stage, "end"))


@pytest.mark.parametrize("make", [lambda shared: shared, lambda shared: take(shared, 9)])
async def test_a_reader_whose_item_another_one_has_taken_waits_for_the_next(
    make: Callable[[Any], Stage[Any]],
) -> None:
    gate, got = anyio.Event(), list[Any]()

    async def source() -> AsyncIterator[int]:
        yield 0
        await gate.wait()
        yield 1

    shared = prefetch(source(), 2)
    stages = [make(shared) for _ in range(2)]
    async with nothing_left():
        async with stages[0], stages[1]:
            await settle()  # the first item is there
            async with anyio.create_task_group() as group:
                for each in stages:
                    group.start_soon(read_one, each, got)
                await settle()
                assert got == [0]
                gate.set()
    assert got == [0, 1]


async def test_items_that_come_at_once_wake_as_many_readers() -> None:
    gate, never, got = anyio.Event(), anyio.Event(), list[Any]()

    async def a_pass() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await (never if gate.is_set() else gate).wait()

    # at the end of a pass the shuffle gives all that it holds
    async with prefetch(repeat(shuffle(a_pass, 4, 0)), 3) as stage:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(read_one, stage, got)
            await settle()
            assert got == []
            gate.set()
            await settle()
            assert sorted(got) == [0, 1, 2]


@on_asyncio
@pytest.mark.parametrize("kind", ["prefetch", "map of it", "map"])
async def test_a_wait_below_a_task_that_is_cancelled_elsewhere_fails_and_no_reader_hangs(
    kind: str,
) -> None:
    future = asyncio.get_running_loop().create_future()

    async def source() -> AsyncGenerator[int, None]:
        yield 0
        yield await future

    async def cancelled(item: int) -> int:
        return item if item == 0 else await future

    stages: dict[str, Callable[[], Stage[int]]] = {
        "prefetch": lambda: prefetch(source(), 2),
        "map of it": lambda: map_concurrent(same, source(), 2),
        "map": lambda: map_concurrent(cancelled, range(2), 2),
    }
    async with nothing_left():
        async with stages[kind]() as items:
            assert await anext(items) == 0
            await settle()
            future.cancel("the download")
            with anyio.fail_after(10):
                with pytest.raises(asyncio.CancelledError, match="the download"):
                    await anext(items)


@on_asyncio
async def test_a_reader_is_given_an_error_where_the_task_of_a_stage_is_cancelled_from_outside() -> (
    None
):
    tasks: list[asyncio.Task[Any]] = []

    async def source() -> AsyncGenerator[int, None]:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        yield 0
        await anyio.sleep_forever()

    async with nothing_left(), prefetch(source(), 2) as items:
        assert await anext(items) == 0
        await settle()
        tasks[0].cancel()
        with anyio.fail_after(10), pytest.raises(RuntimeError, match="cancelled from outside") as e:
            await anext(items)
    assert isinstance(e.value.__cause__, asyncio.CancelledError)


async def test_an_item_that_is_put_back_as_the_buffer_fills_does_not_end_the_input() -> None:
    may_end = anyio.Event()

    async def first() -> AsyncIterator[int]:
        yield 0
        await may_end.wait()

    async with prefetch(chain(first(), [1, 2], [3, 4, 5]), 3) as stage:
        taken = await stage.take(None)  # type: ignore[attr-defined]

        async def give_back() -> None:
            other = await stage.take(None)  # type: ignore[attr-defined]
            for each in (other, taken):
                stage.put_back(each)  # type: ignore[attr-defined]

        async with anyio.create_task_group() as group:
            group.start_soon(give_back)
            await settle()
            may_end.set()
        assert [item async for item in stage] == [0, 1, 2, 3, 4, 5]
