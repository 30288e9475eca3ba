"""Several who wait for one stage with tasks: each is given an item, or told why there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from asynchooks.data import Stage, map_concurrent, prefetch, repeat, shuffle, take

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import only_on_asyncio, same

pytestmark = pytest.mark.anyio


class Readers:
    """Tasks that take one item each; one that finds the end has 'end'."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    async def one(self, stage: Stage[Any]) -> None:
        try:
            self.got.append(await anext(stage))
        except StopAsyncIteration:
            self.got.append("end")


@pytest.mark.parametrize("make", [lambda shared: shared, lambda shared: take(shared, 9)])
async def test_a_reader_whose_item_another_one_has_taken_waits_for_the_next(
    make: Callable[[Any], Stage[Any]],
) -> None:
    gate, readers = anyio.Event(), Readers()

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
                    group.start_soon(readers.one, each)
                await settle()
                assert readers.got == [0]
                gate.set()
    assert readers.got == [0, 1]


async def test_items_that_come_at_once_wake_as_many_readers() -> None:
    gate, never, readers = anyio.Event(), anyio.Event(), Readers()

    async def a_pass() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await (never if gate.is_set() else gate).wait()

    # at the end of a pass the shuffle gives all that it holds
    async with prefetch(repeat(shuffle(a_pass, 4, 0)), 3) as stage:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(readers.one, stage)
            await settle()
            assert readers.got == []
            gate.set()
            await settle()
            assert sorted(readers.got) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["prefetch", "map of it", "map"])
async def test_a_wait_below_a_task_that_is_cancelled_elsewhere_fails_and_no_reader_hangs(
    kind: str, anyio_backend_name: str
) -> None:
    only_on_asyncio(anyio_backend_name)
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


async def test_a_reader_is_given_an_error_where_the_task_of_a_stage_is_cancelled_from_outside(
    anyio_backend_name: str,
) -> None:
    only_on_asyncio(anyio_backend_name)
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
