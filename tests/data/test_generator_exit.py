"""GeneratorExit out of what others wrote is an error of the stage; a coroutine may be closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio.lowlevel
import pytest

from asynchooks.data import Stage, batch, map_concurrent, prefetch, take

from ..support.afterwards import nothing_left
from .sources import Calls, Source, read_all

pytestmark = pytest.mark.anyio


def fails(item: Any) -> Any:
    raise GeneratorExit("by mistake")


async def fails_async(item: Any) -> Any:
    await anyio.lowlevel.checkpoint()
    fails(item)


async def items_that_fail() -> AsyncIterator[int]:
    yield 1
    fails(2)


def items_that_fail_in_thread() -> Iterator[int]:
    yield 1
    fails(2)


STAGES: dict[str, tuple[Callable[[], Stage[Any]], str]] = {
    "fn": (lambda: map_concurrent(fails_async, range(9), 2), "^map_concurrent called what raised"),
    "fn in threads": (lambda: map_concurrent(fails, range(9), 2), "^map_concurrent called what"),
    "awaitable": (lambda: map_concurrent(lambda x: fails_async(x), range(9), 1), "^map_concurrent"),
    "collate": (lambda: batch(range(9), 2, collate=fails), "^batch called what raised Generator"),
    "collate, ahead": (lambda: prefetch(batch([1], 1, collate=fails), 2), "^batch called what"),
    "source": (lambda: take(items_that_fail(), 9), "items_that_fail at .* raised GeneratorExit"),
    "batch": (lambda: batch(items_that_fail(), 9), "items_that_fail at .* raised GeneratorExit"),
    "ahead": (lambda: prefetch(items_that_fail(), 2), "items_that_fail at .* raised Generator"),
    "in map": (lambda: map_concurrent(str, items_that_fail(), 2), "items_that_fail at .* raised"),
    "in a thread": (lambda: take(items_that_fail_in_thread(), 9), "^iterable called what raised"),
    "in a thread, ahead": (lambda: prefetch(items_that_fail_in_thread(), 2), "^iterable called"),
}


@pytest.mark.parametrize("name", STAGES)
async def test_a_generator_exit_leaves_as_an_error_that_names_the_stage(name: str) -> None:
    make, message = STAGES[name]
    async with nothing_left():
        with pytest.raises(RuntimeError, match=message) as caught:
            await read_all(make())
    assert isinstance(caught.value.__cause__, GeneratorExit)


@pytest.mark.parametrize("make", [lambda source: take(source, 9), lambda source: batch(source, 9)])
async def test_a_coroutine_that_waits_for_a_source_can_be_closed(make: Any) -> None:
    calls = Calls()

    class Waiting:
        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> int:
            return await calls(0)

    reading = anext(make(Waiting()))
    reading.send(None)  # it waits
    reading.close()
    assert calls.ended == [0]
    await make(Source(1).items()).aclose()
