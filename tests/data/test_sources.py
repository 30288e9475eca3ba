"""Sources: queues, streams, functions, bare iterators; what cannot be read is refused."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import anyio
import pytest

from asynchooks import FeedHook, InputError, MonitoredSession
from asynchooks.data import Stage, batch, map_concurrent, prefetch, repeat, take

from ..hooks.inputs import Diary
from ..support.afterwards import nothing_left
from ..support.helpers import cancelled_when_settled, settle, turns
from .sources import BadRecordError, Source, on_asyncio, read_all


async def without_items() -> list[int]:
    return [1]


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        (3, ""),
        ("a" * 999, r"would give its letters: write \[text\], or list\(text\)"),
        (lambda: {"x": 1}, r"A mapping would give its keys: write list\(mapping.items\(\)\), or"),
        (list, "A class is no source"),
        (without_items, "that yields nothing returns no items: yield them"),
    ],
)
def test_what_cannot_be_read_is_named_with_how_to_write_it(source: Any, hint: str) -> None:
    match = rf"^source is .{{1,200}}; give a stage, an iterable or async itera.*{hint}"
    with pytest.raises(TypeError, match=match):
        prefetch(source, 1)


@on_asyncio
async def test_an_asyncio_queue_is_a_source_and_a_cancelled_reader_loses_no_item() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(2)
    async with batch(queue, 2) as batches:
        reader = asyncio.create_task(anext(batches))
        queue.put_nowait(0)
        await settle()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        queue.put_nowait(1)
        assert await anext(batches) == [0, 1]


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_queue_of_asyncio_is_refused_elsewhere() -> None:
    with pytest.raises(InputError, match="works on asyncio only"):
        async with prefetch(asyncio.Queue[int](), 1):
            pass


async def test_a_stream_is_a_source_and_its_end_is_the_end() -> None:
    send, receive = anyio.create_memory_object_stream[int](9)
    with receive:
        async with batch(receive, 3) as batches:
            send.send_nowait(0)
            assert await cancelled_when_settled(anext, batches)
            for number in range(1, 7):
                send.send_nowait(number)
            send.close()
            assert [item async for item in batches] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(
    "make", [lambda each: batch(each, 2), lambda each: prefetch(take(each, 9), 1)]
)
async def test_a_generator_that_runs_elsewhere_is_named_with_the_cause(make: Any) -> None:
    generator = Source(0, hangs=True).items()
    async with anyio.create_task_group() as group:
        group.start_soon(anext, generator, None)
        await settle()
        with pytest.raises(InputError, match="<async_generator .* is being read elsewhere") as e:
            await read_all(make(generator))
        group.cancel_scope.cancel()
    assert isinstance(e.value.__cause__, RuntimeError)


@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: Source(1).items()])
@pytest.mark.parametrize("num_epochs", [None, 2, 1])
async def test_what_can_be_read_once_only_cannot_be_repeated(make: Any, num_epochs: Any) -> None:
    for source in (make(), prefetch(batch(make(), 1), 1), map_concurrent(str, make(), 1)):
        if num_epochs == 1:
            assert len(await read_all(repeat(source, num_epochs))) == 1
            continue
        with pytest.raises(TypeError, match=r"can be read once only.*write: repeat\(function\)"):
            repeat(source, num_epochs)


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
async def test_a_bare_generator_has_one_reader(kind: str) -> None:
    source = getattr(Source(20), kind)()
    creator = Diary().creator
    async with nothing_left():
        async with MonitoredSession([FeedHook(source, "x")], creator) as first:
            assert await first.run("x") == 0
            with pytest.raises(InputError, match="give all readers the same stage"):
                async with MonitoredSession([FeedHook(source, "x")], creator) as second:
                    await second.run("x")
            assert await first.run("x") == 1


@pytest.mark.parametrize("make", [lambda source: batch(source, 1), lambda source: take(source, 9)])
async def test_a_cancelled_wait_ends_a_bare_generator_and_is_an_error_for_later_readers(
    make: Callable[[Any], Stage[Any]],
) -> None:
    source = Source(1, hangs=True)
    async with make(source.items()) as stage:
        await anext(stage)
        assert await cancelled_when_settled(anext, stage)
        assert source.is_closed
        for _ in range(2):
            with pytest.raises(InputError, match="was cancelled while it was read.*put prefetch"):
                await anext(stage)


class Numbers:
    """An iterator under way, of the caller."""

    def __init__(self) -> None:
        self.at = -1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


class AsyncNumbers(Numbers):
    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        await turns()
        return next(self)


async def test_an_iterator_that_the_pipeline_made_is_closed_though_it_is_no_generator() -> None:
    closed: list[int] = []

    class Lines(AsyncNumbers):
        async def aclose(self) -> None:
            closed.append(self.at)

    class Records:
        def __aiter__(self) -> Lines:
            return Lines()

    async with take(Records(), 2) as stage:
        await anext(stage)
        assert closed == []
    assert closed == [0]


@pytest.mark.parametrize("kind", [Numbers, AsyncNumbers])
async def test_an_iterator_of_the_caller_has_one_reader_at_a_time_and_then_another(
    kind: Callable[[], Any],
) -> None:
    source = kind()
    async with take(source, 3) as first:
        assert await anext(first) == 0
        with pytest.raises(InputError, match="is being read elsewhere"):
            await anext(take(source, 3))
    assert await read_all(take(source, 3)) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
@pytest.mark.parametrize("num_items", [0, 1, 5])
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda make: prefetch(make(), 9), 1),
        (lambda make: take(make(), 9), 1),
        (lambda make: batch(make(), 2), 2),
        (lambda make: batch(repeat(make, 2), 3), 3),
        (lambda make: prefetch(batch(make(), 2), 2), 2),
    ],
)
async def test_an_error_of_a_source_comes_behind_its_items_names_it_alone_and_stays(
    make: Callable[[Any], Stage[Any]], size: int, num_items: int, kind: str
) -> None:
    error, got = BadRecordError(), list[Any]()
    async with make(getattr(Source(num_items, error), kind)) as stage:
        for _ in range(3):
            with pytest.raises(BadRecordError) as caught:
                async for each in stage:
                    got += each if size > 1 else [each]
            assert caught.value is error
    assert got == list(range(num_items - num_items % size))
    [note] = error.__notes__
    assert f"after {num_items} items" in note
