"""Sources: queues, streams, functions, bare iterators; what cannot be read is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
import anyio.lowlevel
import pytest

from asynchooks import FeedHook, FunctionSessionCreator, InputError, MonitoredSession
from asynchooks.data import (
    Stage,
    batch,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    shard,
    shuffle,
    take,
)

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import Source, on_asyncio, read_all, read_some, same

pytestmark = pytest.mark.anyio


async def without_items() -> list[int]:
    return [1]


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        (3, ""),
        (None, ""),
        (object(), ""),
        ("a" * 999, r"would give its letters: write \[text\], or list\(text\)"),
        (b"bytes", "A text would give its letters"),
        ({"x": [1, 2]}, r"A mapping would give its keys: write list\(mapping.items\(\)\), or"),
        (lambda: {"x": 1}, "A mapping would give its keys"),
        (list, "A class is no source"),
        (without_items, "that yields nothing returns no items: yield them"),
    ],
)
def test_what_cannot_be_read_is_named_with_how_to_write_it(source: Any, hint: str) -> None:
    match = rf"^source is .{{1,200}}; give a stage, an iterable or async itera.*{hint}"
    with pytest.raises(TypeError, match=match):
        prefetch(source, 1)


@on_asyncio
async def test_an_asyncio_queue_is_a_source() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(2)

    async def fill() -> None:
        for each in range(6):
            await queue.put(each)

    async with nothing_left():
        async with anyio.create_task_group() as group, prefetch(take(queue, 6), 2) as items:
            group.start_soon(fill)
            assert [item async for item in items] == list(range(6))


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_queue_of_asyncio_is_refused_elsewhere() -> None:
    with pytest.raises(InputError, match="works on asyncio only"):
        async with prefetch(asyncio.Queue[int](), 1):
            pass


async def test_a_stream_is_named_in_reasons_without_its_inner_state() -> None:
    send, receive = anyio.create_memory_object_stream[int](9)
    for i in range(9):
        send.send_nowait(i)
    send.close()
    session = MonitoredSession([FeedHook(receive, "x")], FunctionSessionCreator(lambda x: {"x": x}))
    async with receive, session:
        while not session.should_stop():
            await session.run("x")
    assert "a MemoryObjectReceiveStream" in str(session.stop_reason)
    assert "MemoryObjectStreamState" not in str(session.stop_reason)


@on_asyncio
async def test_a_queue_is_named_without_its_items() -> None:
    queue: asyncio.Queue[list[int]] = asyncio.Queue()
    queue.put_nowait(list(range(100)))
    assert repr(prefetch(queue, 1)) == "prefetch(a Queue)"


@on_asyncio
async def test_a_cancelled_reader_of_a_queue_loses_no_item() -> None:
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


@asynccontextmanager
async def running_elsewhere() -> AsyncIterator[AsyncGenerator[int, None]]:
    """A generator that another task waits for."""
    generator = Source(1, hangs=True).items()
    async with anyio.create_task_group() as group:
        await anext(generator)
        group.start_soon(anext, generator, None)
        await settle()
        try:
            yield generator
        finally:
            group.cancel_scope.cancel()


@pytest.mark.parametrize(
    "make",
    [lambda each: take(each, 9), lambda each: batch(each, 2), lambda each: prefetch(each, 1)],
)
async def test_a_generator_that_runs_elsewhere_is_named_with_the_cause(make: Any) -> None:
    words = "<async_generator .* is being read elsewhere; give"
    async with running_elsewhere() as generator:
        with pytest.raises(InputError, match=words) as caught:
            await read_all(make(generator))
    assert isinstance(caught.value.__cause__, RuntimeError)


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


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
async def test_a_bare_generator_has_one_reader(kind: str) -> None:
    source = getattr(Source(20), kind)()
    creator = FunctionSessionCreator(lambda x: {"x": x})
    async with nothing_left():
        async with MonitoredSession([FeedHook(source, "x")], creator) as first:
            assert await first.run("x") == 0
            with pytest.raises(InputError, match="give all readers the same stage"):
                async with MonitoredSession([FeedHook(source, "x")], creator) as second:
                    await second.run("x")
            assert await first.run("x") == 1


async def test_a_stage_without_tasks_needs_no_block() -> None:
    assert [item async for item in batch([1, 2, 3], 2)] == [[1, 2], [3]]
    stage = batch(Source(3).items(), 2)
    assert await read_some(stage, 1) == [[0, 1]]
    await stage.aclose()


async def cancel_a_wait(stage: Stage[Any]) -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(anext, stage)
            await settle()
            scope.cancel()


@pytest.mark.parametrize(
    "around",
    [
        lambda source: batch(source, 1),
        lambda source: take(source, 9),
        lambda source: repeat(shuffle(source, 1, 0), 1),
    ],
)
async def test_a_cancelled_wait_ends_a_bare_generator_and_is_an_error_for_later_readers(
    around: Callable[[Any], Stage[Any]],
) -> None:
    source = Source(1, hangs=True)
    async with around(source.items()) as stage:
        await anext(stage)
        await cancel_a_wait(stage)
        assert source.is_closed
        for _ in range(2):
            with pytest.raises(InputError, match="was cancelled while it was read.*put prefetch"):
                await anext(stage)


@pytest.mark.parametrize(
    "around",
    [lambda source: prefetch(batch(source, 1), 1), lambda source: batch(prefetch(source, 1), 1)],
)
async def test_a_cancelled_wait_is_not_seen_by_a_generator_behind_a_prefetch(
    around: Callable[[Any], Stage[Any]],
) -> None:
    gate = anyio.Event()

    async def source() -> AsyncIterator[int]:
        yield 0
        await gate.wait()
        yield 1

    async with around(source()) as stage:
        assert await anext(stage) == [0]
        await cancel_a_wait(stage)
        gate.set()
        assert await read_some(stage, 9) == [[1]]


class Iterated:
    """An async iterable whose iterators are no generators, and can be closed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._at = 0

    def __aiter__(self) -> Iterated:
        again = Iterated()
        again.log = self.log
        return again

    async def __anext__(self) -> int:
        await anyio.lowlevel.checkpoint()
        self._at += 1
        return self._at

    async def aclose(self) -> None:
        self.log.append(f"closed at {self._at}")


@pytest.mark.parametrize("around", [lambda each: batch(each, 2), lambda each: take(each, 2)])
async def test_an_iterator_that_the_pipeline_made_is_closed_though_it_is_no_generator(
    around: Callable[[Any], Stage[Any]],
) -> None:
    source = Iterated()
    async with around(source) as stage:
        await anext(stage)
        assert source.log == []
    assert source.log in (["closed at 1"], ["closed at 2"])


class Numbers:
    """An iterator under way, of the caller."""

    def __init__(self) -> None:
        self._at = -1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        self._at += 1
        return self._at


class AsyncNumbers(Numbers):
    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        await anyio.lowlevel.checkpoint()
        return next(self)


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


async def test_an_iterable_may_run_an_event_loop_and_a_pipeline_in_its_thread() -> None:
    async def inner() -> list[Any]:
        return await read_all(prefetch(batch(range(4), 2), 1))

    def source() -> Iterator[Any]:
        for backend in ("asyncio", "trio"):
            yield from anyio.run(inner, backend=backend)

    async with nothing_left():
        assert await read_all(prefetch(source(), 2)) == 2 * [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
@pytest.mark.parametrize(
    "around",
    [
        lambda source: batch(source, 1),
        lambda source: take(source, 9),
        lambda source: shard(source, 1, 0),
        lambda source: shuffle(source, 1, 0),
        lambda source: interleave([source]),
        lambda source: prefetch(batch(source, 1), 2),
        lambda source: map_concurrent(same, source, 2),
    ],
)
async def test_every_stage_of_a_function_can_be_read_again(
    kind: str, around: Callable[[Any], Stage[Any]]
) -> None:
    source = Source(3)
    once = await read_all(around(getattr(source, kind)))
    assert len(once) == 3
    assert await read_all(repeat(around(getattr(source, kind)), 2)) == 2 * once
    assert source.num_begun == source.num_closed == 3


async def test_a_wait_that_is_cancelled_on_the_way_to_the_position_loses_none_and_adds_none() -> (
    None
):
    gate = anyio.Event()

    class Slow(AsyncNumbers):
        async def __anext__(self) -> int:
            if self._at == 1:
                await gate.wait()
            return await super().__anext__()

    stage = batch(Slow(), 2)
    source = {"stage": "async iterable", "items": 4}
    stage.load_state_dict({"stage": "batch", "items": 4, "source": source})
    async with stage:
        await cancel_a_wait(stage)
        gate.set()
        assert await read_some(stage, 2) == [[4, 5], [6, 7]]


class Flaky:
    """Fails at its third item, once, and goes on."""

    def __init__(self) -> None:
        self._next = 0
        self._has_failed = False

    def __aiter__(self) -> Flaky:
        return self

    async def __anext__(self) -> int:
        if self._next == 2 and not self._has_failed:
            self._has_failed = True
            raise OSError("flaky")
        if self._next == 4:
            raise StopAsyncIteration
        self._next += 1
        return self._next - 1


async def failing() -> AsyncIterator[int]:
    yield 0
    yield 1
    raise OSError("flaky")


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_generator_that_has_failed_has_not_ended_for_the_next_reader(size: int) -> None:
    async with batch(failing(), size) as batches:
        with pytest.raises(OSError, match="flaky"):
            async for _ in batches:
                pass
        for _ in range(2):
            with pytest.raises(OSError, match="flaky"):
                await anext(batches)


async def test_a_pass_that_has_failed_is_not_followed_by_another_one() -> None:
    async with repeat(failing, 2) as items:
        assert [await anext(items), await anext(items)] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="flaky"):
                await anext(items)


@pytest.mark.parametrize("size", [1, 2])
async def test_an_iterator_that_goes_on_after_an_error_is_read_on_to_its_end(size: int) -> None:
    items: list[int] = []
    async with batch(Flaky(), size, collate=list) as batches:
        while True:
            try:
                async for several in batches:
                    items += several
            except OSError:
                continue
            break
    assert items == [0, 1, 2, 3]


class Passes:
    """Three items in each pass; at the end of the second pass it is cancelled once."""

    def __init__(self) -> None:
        self.at = self.num_ended = 0
        self.scope = anyio.CancelScope()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]

    def __aiter__(self) -> Self:
        if self.num_ended:
            self.at = 0
        return self

    async def __anext__(self) -> int:
        if self.at == 3:
            if self.num_ended == 1 and not self.scope.cancel_called:
                self.scope.cancel()
                await anyio.lowlevel.checkpoint()
            self.num_ended += 1
            raise StopAsyncIteration
        self.at += 1
        return self.at


async def test_a_cancellation_behind_a_pass_that_was_over_begins_no_further_one() -> None:
    source = Passes()
    stage = batch(source, 4)
    own = {"stage": "async iterable", "state": {"at": 3}, "pass_over": True}
    stage.load_state_dict({"stage": "batch", "items": 0, "source": own, "place": 0, "beyond": []})
    async with stage:
        with source.scope:
            await anext(stage)
        assert source.scope.cancelled_caught
        assert await read_all(stage) == [[1, 2, 3]]
