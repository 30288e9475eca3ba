"""Sources: queues, streams, functions; what cannot be read says what to give."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from asynchooks import InputError
from asynchooks.data import batch, map_concurrent, prefetch, repeat, take

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import Source, only_on_asyncio, read_all, read_some

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("source", ["text", b"bytes", {"a": 1}, 3, None, list, object()])
def test_what_cannot_be_read_is_named(source: Any) -> None:
    with pytest.raises(TypeError, match=r"^source is .*; give a stage, an iterable or async itera"):
        prefetch(source, 1)


def test_what_is_likely_a_mistake_is_shown_how_to_write() -> None:
    for source, message in (
        (
            "a" * 999,
            r"^source is 'a{196}\.\.\.; .*would give its letters: write \[text\], or list\(text\)",
        ),
        (b"bytes", r"A text would give its letters"),
        ({"x": [1, 2]}, r"A mapping would give its keys: write list\(mapping.items\(\)\), or"),
        (lambda: {"x": 1}, r"A mapping would give its keys"),
    ):
        with pytest.raises(TypeError, match=message):
            prefetch(source, 1)


async def test_an_asyncio_queue_is_a_source(anyio_backend_name: str) -> None:
    only_on_asyncio(anyio_backend_name)
    queue: asyncio.Queue[int] = asyncio.Queue(2)

    async def fill() -> None:
        for each in range(6):
            await queue.put(each)

    async with nothing_left():
        async with anyio.create_task_group() as group, prefetch(take(queue, 6), 2) as items:
            group.start_soon(fill)
            assert [item async for item in items] == list(range(6))


async def test_a_cancelled_reader_of_a_queue_loses_no_item(anyio_backend_name: str) -> None:
    only_on_asyncio(anyio_backend_name)
    queue: asyncio.Queue[int] = asyncio.Queue()
    async with batch(queue, 2) as batches:
        reader = asyncio.create_task(anext(batches))
        queue.put_nowait(0)
        await settle()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        queue.put_nowait(1)
        assert await anext(batches) == [0, 1]


async def test_a_stream_is_a_source_and_its_end_is_the_end() -> None:
    send, receive = anyio.create_memory_object_stream[int](1)

    async def fill() -> None:
        async with send:
            for each in range(7):
                await send.send(each)

    with receive:
        async with anyio.create_task_group() as group:
            group.start_soon(fill)
            got = await read_all(prefetch(batch(receive, 3), 1))
    assert got == [[0, 1, 2], [3, 4, 5], [6]]


async def test_a_cancelled_reader_of_a_stream_keeps_what_was_read() -> None:
    send, receive = anyio.create_memory_object_stream[int](9)
    with send, receive:
        async with batch(receive, 3) as batches:
            send.send_nowait(0)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(anext, batches)
                    await settle()
                    scope.cancel()
            send.send_nowait(1)
            send.send_nowait(2)
            assert await anext(batches) == [0, 1, 2]


@pytest.mark.parametrize("make", [lambda each: take(each, 9), lambda each: batch(each, 2)])
async def test_a_generator_that_runs_elsewhere_is_named(make: Any) -> None:
    source = Source(1, hangs=True)
    generator = source.items()
    async with anyio.create_task_group() as group:
        await anext(generator)
        group.start_soon(anext, generator, None)
        await settle()
        stage = make(generator)
        with pytest.raises(InputError, match=r"<async_generator .* is being read elsewhere; give"):
            await anext(stage)
        group.cancel_scope.cancel()


async def test_the_error_of_a_generator_that_runs_elsewhere_keeps_its_cause() -> None:
    source = Source(1, hangs=True)
    generator = source.items()
    async with anyio.create_task_group() as group:
        await anext(generator)
        group.start_soon(anext, generator, None)
        await settle()
        with pytest.raises(InputError) as caught:
            await anext(take(generator, 9))
        group.cancel_scope.cancel()
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_a_generator_that_runs_elsewhere_is_named_also_when_the_block_is_left() -> None:
    source = Source(1, hangs=True)
    generator = source.items()
    async with anyio.create_task_group() as group:
        await anext(generator)
        group.start_soon(anext, generator, None)
        await settle()
        try:
            with pytest.raises(InputError, match="is being read elsewhere"):
                await read_all(prefetch(generator, 1))
        finally:
            group.cancel_scope.cancel()


async def test_another_runtime_error_of_a_generator_leaves_as_itself() -> None:
    error = RuntimeError("of the user")
    for stage in (take(Source(2, error).items(), 9), batch(Source(2, error).items(), 9)):
        with pytest.raises(RuntimeError) as caught:
            await read_all(stage)
        assert caught.value is error


async def test_a_function_may_return_any_source() -> None:
    for made in ([1, 2], iter([1, 2]), take([1, 2, 3], 2)):
        assert await read_all(batch(lambda made=made: made, 1)) == [[1], [2]]


@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: Source(1).items(),
                                  lambda: Source(1).items_in_thread()])  # fmt: skip
@pytest.mark.parametrize("num_epochs", [None, 2])
def test_what_can_be_read_once_only_cannot_be_repeated(make: Any, num_epochs: Any) -> None:
    for source in (make(), prefetch(batch(make(), 1), 1), map_concurrent(str, make(), 1)):
        with pytest.raises(TypeError, match=r"can be read once only.*write: repeat\(function\)"):
            repeat(source, num_epochs)


@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: Source(1).items()])
async def test_one_pass_over_what_can_be_read_once_only_is_fine(make: Any) -> None:
    assert len(await read_all(repeat(make(), 1))) == 1


async def test_a_stage_without_tasks_needs_no_block() -> None:
    assert [item async for item in batch([1, 2, 3], 2)] == [[1, 2], [3]]
    stage = batch(Source(3).items(), 2)
    assert await read_some(stage, 1) == [[0, 1]]
    await stage.aclose()
