"""prefetch: one task reads ahead, within bounds; several may wait for its items."""

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
    map_concurrent,
    prefetch,
    repeat,
    shard,
    shuffle,
)

from ..support.afterwards import nothing_left
from ..support.helpers import in_task, settle
from .sources import Source, on_asyncio, same


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("has_failed", [False, True])
async def test_an_error_of_its_clean_up_leaves_where_a_read_of_the_source_is_cancelled(
    has_failed: bool, in_group: bool
) -> None:
    async def hold() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("cannot be closed")

    async def read() -> AsyncIterator[int]:
        yield 0
        if not in_group:
            await hold()
        async with anyio.create_task_group() as group:
            group.start_soon(hold)

    with pytest.raises((KeyError, OSError, ExceptionGroup)) as caught:
        async with map_concurrent(same, batch(read(), 1), 2) as items:
            await anext(items)
            await settle()
            if has_failed:
                raise KeyError
    if has_failed:
        assert "OSError('cannot be closed')" in caught.value.__notes__[0]
    else:
        assert isinstance(caught.value, ExceptionGroup) == in_group


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: prefetch([1], 1), r"Got: async for item in prefetch\(\.\.\.\); write: async with"),
        (lambda: batch(prefetch([1], 1), 1), r"write: async with batch\(\.\.\.\) as items:"),
    ],
)
async def test_it_must_be_opened_and_says_how(make: Any, line: str) -> None:
    with pytest.raises(RuntimeError, match=rf"prefetch\(.* runs tasks and must be opened.*{line}"):
        await anext(make())


async def test_a_reader_that_is_cancelled_as_it_is_woken_leaves_the_item_to_the_next() -> None:
    scope, may_go_on, may_end = anyio.CancelScope(), anyio.Event(), anyio.Event()

    async def source() -> AsyncIterator[int]:
        await may_go_on.wait()
        yield 7
        scope.cancel()
        await may_end.wait()

    async def read() -> Any:
        with scope:
            return await anext(items)

    async with prefetch(source(), 4) as items:
        async with in_task(read) as first, in_task(anext, items) as second:
            may_go_on.set()
            await settle()
            assert 7 in (first.value, second.value)
            may_end.set()


async def test_a_loop_that_never_waits_can_be_cancelled() -> None:
    num = 0
    async with prefetch(Source(None).items(), 2) as items:
        with anyio.CancelScope() as scope:
            async for _ in items:
                num += 1
                scope.cancel()
                assert num < 1000, "never cancelled"


# a stage, and how many items of the source are read when `taken` of its own were taken
BOUNDS: dict[str, tuple[Any, Any]] = {
    "prefetch": (lambda source: prefetch(source, 3), lambda taken: taken + 3),
    "map": (lambda source: map_concurrent(str, source, 3), lambda taken: taken + 3),
    "unordered": (
        lambda source: map_concurrent(same, source, 3, ordered=False),
        lambda taken: taken + 3,
    ),
    "batch": (lambda source: batch(source, 3), lambda taken: 3 * taken),
    "shuffle": (lambda source: shuffle(source, 4, 1), lambda taken: taken + 3 if taken else 0),
    "shard": (
        lambda source: shard(source, 3, 1),
        lambda taken: 3 * (taken - 1) + 2 if taken else 0,
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
        for taken in range(4):
            await settle()
            assert source.num_read <= bound(taken)
            if kind == "items":  # else a thread may not be so far yet
                assert source.num_read == bound(taken)
            await anext(items)


async def test_items_that_come_at_once_wake_as_many_readers() -> None:
    gate, never = anyio.Event(), anyio.Event()

    async def a_pass() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await (never if gate.is_set() else gate).wait()

    # at the end of a pass the shuffle gives all that it holds
    async with prefetch(repeat(shuffle(a_pass, 4, 0)), 3) as stage:
        async with (
            in_task(anext, stage) as one,
            in_task(anext, stage) as two,
            in_task(anext, stage) as end,
        ):
            gate.set()
            await settle()
            assert {one.value, two.value, end.value} == {0, 1, 2}


@on_asyncio
@pytest.mark.parametrize("kind", ["prefetch", "map"])
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
        "map": lambda: map_concurrent(cancelled, range(2), 2),
    }
    async with nothing_left(), stages[kind]() as items:
        assert await anext(items) == 0
        await settle()
        future.cancel("the download")
        with pytest.raises(asyncio.CancelledError, match="the download"):
            await anext(items)


async def test_an_item_that_is_put_back_as_the_buffer_fills_does_not_end_the_input() -> None:
    """No public call gives one back at that moment."""
    may_end = anyio.Event()

    async def first() -> AsyncIterator[int]:
        yield 0
        await may_end.wait()

    stage: Any
    async with prefetch(chain(first(), [1, 2], [3, 4, 5]), 3) as stage:
        taken = await stage.take(None)

        async def give_back() -> None:
            other = await stage.take(None)
            for each in (other, taken):
                stage.put_back(each)

        async with in_task(give_back):
            may_end.set()
        assert [item async for item in stage] == [0, 1, 2, 3, 4, 5]
