"""Closing: however a loop is left, producers end, and generators and files are closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import FunctionSessionCreator, InputError, InputStateError, MonitoredSession
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
from .recipes import MOST
from .sources import BadRecordError, Calls, Source, only_on_asyncio, read_all, same, same_in_thread

pytestmark = pytest.mark.anyio


class Slowly:
    """Generators whose end takes some turns of the event loop."""

    def __init__(self) -> None:
        self.num_closed = 0

    async def numbers(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(5000):
                yield number
        finally:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            self.num_closed += 1


async def _mapped(item: int) -> int:
    if item > 3:
        await anyio.sleep(0.01)
    return item


AROUND: dict[str, Callable[[Any], Any]] = {
    "prefetch": lambda source: prefetch(source, 3),
    "map": lambda source: map_concurrent(_mapped, source, 4),
    "map in threads": lambda source: map_concurrent(same_in_thread, source, 4),
    "prefetch of map": lambda source: prefetch(map_concurrent(_mapped, source, 4), 2),
    "prefetch of batches": lambda source: prefetch(
        batch(map_concurrent(_mapped, source, 4, ordered=False), 2), 2
    ),
}


@pytest.mark.parametrize("around", AROUND)
async def test_a_loop_that_is_left_waits_for_the_end_of_the_generator(around: str) -> None:
    source = Slowly()
    async with nothing_left():
        async with AROUND[around](source.numbers()) as items:
            async for _ in items:
                break
    assert source.num_closed == 1


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("error", [ValueError("five"), SystemExit(3)])
async def test_the_first_error_leaves_and_the_generator_ends(
    ordered: bool, error: BaseException
) -> None:
    async def fn(item: int) -> int:
        if item == 5:
            raise error
        return await _mapped(item)

    source = Slowly()
    async with nothing_left():
        with pytest.raises(type(error)) as caught:
            await read_all(map_concurrent(fn, source.numbers(), 4, ordered))
    assert caught.value is error
    assert source.num_closed == 1


async def test_a_reader_that_waits_for_a_thread_gets_the_error_of_a_closed_stage() -> None:
    may_go_on = threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        may_go_on.wait(10)
        yield 2

    seen: list[Any] = []

    async def read(stage: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it got one item more, and asks for another
            async for item in stage:
                seen.append(item)
                waits.set()

    waits = anyio.Event()
    async with nothing_left():
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                async with batch(numbers(), 1) as stage:
                    group.start_soon(read, stage)
                    await waits.wait()
                    await anyio.lowlevel.checkpoint()
                    may_go_on.set()
    assert seen[0] == [1]


@pytest.mark.parametrize(
    "make", [lambda: repeat([1, 2, 3]), lambda: interleave([range(10_000), range(10_000)])]
)
async def test_two_that_share_a_stage_may_be_far_apart(make: Callable[[], Any]) -> None:
    shared = make()
    first, second = take(shared, 10**6), take(shared, 10**6)
    async with first, second:
        for _ in range(1100):
            await anext(first)
        for _ in range(600):
            await anext(second)
    assert shared.statistics().num_items == 1700


async def test_a_shuffle_whose_source_has_become_shorter_says_so() -> None:
    longer = shuffle(range(20), 8, 1)
    for _ in range(6):
        await anext(longer)
    shorter = shuffle(range(9), 8, 1)
    shorter.load_state_dict(longer.state_dict())
    with pytest.raises(InputStateError, match="ended at item 9"):
        await anext(shorter)


async def test_a_repeat_that_is_beyond_its_last_epoch_has_ended() -> None:
    longer = repeat([1, 2, 3], 5)
    for _ in range(13):
        await anext(longer)
    shorter = repeat([1, 2, 3], 2)
    shorter.load_state_dict(longer.state_dict())
    assert await read_all(shorter) == []


async def test_an_empty_source_is_not_repeated_again_and_again() -> None:
    assert await read_all(repeat([], 10**9)) == []
    with pytest.raises(InputError, match="is empty"):
        await read_all(repeat([]))


async def test_two_loops_over_one_source_share_its_items() -> None:
    creator = FunctionSessionCreator(lambda x: {"x": x})
    source, used = prefetch(range(8), 3), []
    async with MonitoredSession([], creator) as session:
        one, other = session.batches(source), session.batches(source)
        used += [await session.run("x", {"x": await anext(one)})]
        held = await anext(one)
        used += [await session.run("x", {"x": await anext(other)})]
        used += [await session.run("x", {"x": held})]
        async for item in other:
            used += [await session.run("x", {"x": item})]
    assert sorted(used) == list(range(8))


every_way = pytest.mark.parametrize(
    "around", [lambda source: batch(source, 1), lambda source: prefetch(batch(source, 1), 1)]
)


async def fails_to_close(error: BaseException) -> AsyncGenerator[int, None]:
    try:
        while True:
            await anyio.lowlevel.checkpoint()
            yield 0
    finally:
        raise error


@every_way
async def test_an_exit_in_closing_leaves_though_the_block_has_failed(
    around: Callable[[Any], Any],
) -> None:
    error = SystemExit(3)
    async with nothing_left():
        with pytest.raises(SystemExit) as caught:
            async with around(fails_to_close(error)) as items:
                await anext(items)
                raise BadRecordError
    assert caught.value is error


@every_way
async def test_a_runtime_error_in_closing_leaves_as_itself(around: Callable[[Any], Any]) -> None:
    error = RuntimeError("of the user")
    with pytest.raises(RuntimeError) as caught:
        async with around(fails_to_close(error)) as items:
            await anext(items)
    assert caught.value is error


async def test_a_cancellation_in_closing_passes_through_though_the_block_has_failed() -> None:
    with anyio.CancelScope() as scope:
        async with batch(unshielded_end(), 1) as items:
            await anext(items)
            scope.cancel()
            raise BadRecordError
    assert scope.cancelled_caught


async def unshielded_end() -> AsyncGenerator[int, None]:
    try:
        yield 0
    finally:
        await anyio.lowlevel.checkpoint()


async def test_of_several_errors_in_closing_the_first_leaves_and_all_are_closed() -> None:
    first, second, last = OSError("first"), OSError("second"), Source(None)
    stage = interleave([fails_to_close(first), fails_to_close(second), last.items()])
    with pytest.raises(OSError, match="first") as caught:
        async with stage as items:
            for _ in range(3):
                await anext(items)
    assert caught.value is first
    assert last.is_closed


@every_way
async def test_an_end_of_some_input_within_collate_is_not_the_end(
    around: Callable[[Any], Any],
) -> None:
    def collate(items: list[Any]) -> Any:
        raise StopAsyncIteration

    with pytest.raises(RuntimeError, match="batch called what raised StopAsyncIteration"):
        await read_all(around(batch(range(4), 2, collate=collate)))


EXITS_OF: dict[str, Callable[[Any], Stage[Any]]] = {
    "prefetch": lambda source: prefetch(source, 3),
    "batch": lambda source: batch(source, 1),
    "shuffle": lambda source: shuffle(source, 3, 1),
    "shard": lambda source: shard(source, 2, 1),
    "take": lambda source: take(source, 99),
    "repeat": lambda source: repeat(source, 1),
    "interleave": lambda source: interleave([source, [0] * 99]),
    "map": lambda source: map_concurrent(same, source, min(3, MOST)),
    "map in threads": lambda source: map_concurrent(same_in_thread, source, min(3, MOST)),
    "map unordered": lambda source: map_concurrent(same, source, min(3, MOST), ordered=False),
    "many": lambda source: prefetch(
        batch(map_concurrent(same, repeat(shuffle(prefetch(source, 2), 2, 0), 1), min(2, MOST)), 1),
        2,
    ),
    "interleaved prefetches": lambda source: interleave(
        [prefetch(source, 2), prefetch([1] * 99, 2)]
    ),
}
KINDS = ["items", "items_in_thread"]
around = pytest.mark.parametrize("around", EXITS_OF)
kinds = pytest.mark.parametrize("kind", KINDS)


@around
@kinds
@pytest.mark.parametrize("way", ["break", "error", "scope", "group", "native"])
async def test_leaving_a_loop_ends_all_at_once(
    around: str, kind: str, way: str, anyio_backend_name: str, request: pytest.FixtureRequest
) -> None:
    if way == "native":
        only_on_asyncio(anyio_backend_name)
    source = Source(None)
    closed: list[bool] = []

    async def read(scope: anyio.CancelScope | None = None) -> None:
        try:
            async with EXITS_OF[around](getattr(source, kind)()) as items:
                num = 0
                async for _ in items:
                    num += 1
                    assert num < 2000, "never cancelled"
                    if num < 3:
                        continue
                    if way == "break":
                        break
                    if way == "error":
                        raise BadRecordError
                    if way == "native":
                        task = asyncio.current_task()
                        assert task is not None
                        task.cancel()
                    elif scope is not None:
                        scope.cancel()
        finally:
            closed.append(source.is_closed)

    async with nothing_left():
        if way == "error":
            with pytest.raises(BadRecordError):
                await read()
        elif way == "native":
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(read())
        elif way == "group":
            async with anyio.create_task_group() as group:
                group.start_soon(read, group.cancel_scope)
        elif way == "scope":
            with anyio.CancelScope() as scope:
                await read(scope)
            assert scope.cancelled_caught
        else:
            await read()
    assert closed == [True]
    assert source.num_begun == 1


@around
@pytest.mark.parametrize("is_native", [False, True])
async def test_cancelling_the_reader_of_a_source_that_hangs_ends_all(
    around: str, is_native: bool, anyio_backend_name: str
) -> None:
    if is_native:
        only_on_asyncio(anyio_backend_name)
    source = Source(2, hangs=True)

    async def read() -> None:
        try:
            async with EXITS_OF[around](source.items()) as items:
                async for _ in items:
                    pass
        finally:
            assert source.is_closed

    async with nothing_left():
        if is_native:
            task = asyncio.create_task(read())
            await settle()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await settle()
                group.cancel_scope.cancel()
    assert source.is_closed


@around
@kinds
async def test_an_error_of_the_source_leaves_as_itself_and_closes_all(
    around: str, kind: str
) -> None:
    error = BadRecordError("bad record")
    source = Source(4, error)
    async with nothing_left():
        with pytest.raises(BadRecordError) as caught:
            async with EXITS_OF[around](getattr(source, kind)()) as items:
                async for _ in items:
                    pass
        assert caught.value is error
    assert source.is_closed


async def test_a_pipeline_is_closed_as_well_if_it_was_never_opened() -> None:
    ended: list[bool] = []

    async def read() -> Any:
        try:
            yield 1
        finally:
            ended.append(True)

    generator = read()
    await anext(generator)
    await prefetch(generator, 1).aclose()
    assert ended == [True]


async def test_closing_twice_is_fine_and_a_closed_stage_cannot_be_read() -> None:
    for make in EXITS_OF.values():
        stage = make(list(range(9)))
        async with stage:
            await anext(stage)
        await stage.aclose()
        with pytest.raises(RuntimeError, match=r"is closed; make a new one"):
            await anext(stage)
        with pytest.raises(RuntimeError, match=r"is closed; make a new one"):
            async with stage:
                pass


@around
async def test_files_of_generators_are_closed(
    around: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "records"
    path.write_text("1\n2\n3\n4\n5\n6\n")

    def read() -> Any:
        with path.open() as file:
            yield from file

    async with nothing_left():
        async with EXITS_OF[around](read()) as items:
            async for _ in items:
                break
        await read_all(EXITS_OF[around](read()))


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
