"""Misuse is reported, and notes of errors say where in the pipeline they came from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    DataWaitHook,
    FeedHook,
    FunctionSessionCreator,
    InputError,
    InputPositionHook,
    InputStructureError,
    MonitoredSession,
)
from asynchooks.data import Stage, batch, interleave, map_concurrent, prefetch, shuffle, take

from ..support.afterwards import nothing_left
from .sources import BadRecordError, Source, position, read_all, read_some, same

pytestmark = pytest.mark.anyio


async def numbers(count: int) -> AsyncGenerator[int, None]:
    for number in range(count):
        await anyio.lowlevel.checkpoint()
        yield number


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_bare_generator_has_one_reader(is_async: bool) -> None:
    source: Any = numbers(20) if is_async else (number for number in range(20))
    creator = FunctionSessionCreator(lambda x: {"x": x})
    async with nothing_left():
        async with MonitoredSession([FeedHook(source, "x")], creator) as first:
            assert await first.run("x") == 0
            with pytest.raises(InputError, match="give all readers the same stage"):
                async with MonitoredSession([FeedHook(source, "x")], creator) as second:
                    await second.run("x")
            assert await first.run("x") == 1


async def test_the_end_of_some_input_in_a_threads_call_never_ends_the_pipeline() -> None:
    def fn(item: int) -> int:
        if item == 5:
            raise StopAsyncIteration
        return item

    for ordered in (True, False):
        for _ in range(30):  # by which thread comes back first
            with pytest.raises(RuntimeError, match="called what raised StopAsync") as caught:
                await read_all(map_concurrent(fn, range(20), 4, ordered))
            assert "in map_concurrent, at item 5" in caught.value.__notes__


@pytest.mark.parametrize("count", [20, 1000])
async def test_a_generator_that_holds_a_scope_is_read_by_one_task(count: int) -> None:
    async def within_scope() -> AsyncGenerator[int, None]:
        with anyio.fail_after(60):
            for number in range(count):
                await anyio.lowlevel.checkpoint()
                yield number

    async with nothing_left():
        async with map_concurrent(same, within_scope(), 3) as items:
            seen = []
            async for item in items:
                seen.append(item)
                if item == 50:
                    break
    assert seen == list(range(min(count, 51)))


async def test_a_queue_of_asyncio_is_refused_elsewhere(anyio_backend_name: str) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    if anyio_backend_name == "asyncio":
        queue.put_nowait(3)
        async with prefetch(queue, 1) as items:
            assert await anext(items) == 3
    else:
        with pytest.raises(InputError, match="works on asyncio only"):
            async with prefetch(queue, 1):
                pass


@pytest.mark.parametrize(
    "items",
    [
        [1, (2, 3)],
        [None, {"a": 1}],
        ["a", np.zeros(2)],
        [[1], (2,)],
        [np.ones(2), np.array(["a", "b"])],
    ],
)
async def test_items_of_two_structures_are_no_batch_in_whichever_order(items: list[Any]) -> None:
    for each in (items, items[::-1]):
        with pytest.raises(InputStructureError, match="batch: item 1 "):
            await read_all(batch(each, 2))


async def test_a_collate_that_is_async_is_refused() -> None:
    async def collate(items: list[int]) -> list[int]:
        return items

    with pytest.raises(TypeError, match="is async; call it through map_concurrent"):
        batch([1], 1, collate=collate)
    misplaced: Any = list
    with pytest.raises(TypeError, match="drop_remainder is <class 'list'>"):
        batch([1], 1, misplaced)


def test_sources_of_interleave_come_in_one_argument() -> None:
    three: Any = 3
    with pytest.raises(TypeError, match=r"interleave got 3; .*interleave\(\[a, b\]\)"):
        interleave(three)


async def test_a_seed_may_be_numpys() -> None:
    seed: Any = np.int64(3)
    assert await read_all(shuffle(range(9), 4, seed)) == await read_all(shuffle(range(9), 4, 3))


@pytest.mark.parametrize("names", [[], (), {}, {"x"}, 3, 1.5])
def test_names_that_are_none_are_refused(names: Any) -> None:
    with pytest.raises(TypeError, match="names is .*; give a name or tensor"):
        FeedHook([1], names)


@pytest.mark.parametrize("names", [["x", "x"], ("x", "y", "x"), {"a": "x", "b": "x"}])
def test_a_name_that_would_be_fed_twice_is_refused(names: Any) -> None:
    with pytest.raises(ValueError, match="feeds one of them twice"):
        FeedHook([1], names)


@pytest.mark.parametrize("hook", [DataWaitHook, InputPositionHook])
def test_a_stage_within_the_pipeline_is_not_what_a_session_draws_from(hook: Any) -> None:
    inner = batch(range(9), 2)
    source = prefetch(inner, 2)
    with pytest.raises(ValueError, match="which another stage reads, .* give the last stage"):
        hook(inner)
    hook(source)


def test_whether_a_map_is_ordered_is_true_or_false() -> None:
    unclear: Any = "no"
    with pytest.raises(TypeError, match="ordered is 'no'; give True or False"):
        map_concurrent(len, [[1]], 2, unclear)


async def test_async_functions_without_items_and_classes_are_no_sources() -> None:
    async def read() -> list[int]:
        return [1]

    with pytest.raises(TypeError, match="that yields nothing returns no items: yield them"):
        prefetch(read, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="A class is no source"):
        prefetch(list, 1)


def test_a_plain_with_is_refused_with_async_with_as_the_remedy() -> None:
    with pytest.raises(TypeError, match="opened by `async with stage:`, not by `with stage:`"):
        with prefetch(range(3), 1):
            raise AssertionError("never entered")


async def notes_of(stage: Stage[Any]) -> list[str]:
    with pytest.raises(BadRecordError) as caught:
        await read_all(stage)
    return caught.value.__notes__


def failing(items: list[Any]) -> Any:
    if 4 in items:
        raise BadRecordError
    return items


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
@pytest.mark.parametrize(
    "around", [lambda each: batch(each, 2), lambda each: prefetch(batch(take(each, 9), 2), 2)]
)
async def test_an_error_of_the_source_names_the_source_alone(
    kind: str, around: Callable[[Any], Stage[Any]]
) -> None:
    source = getattr(Source(4, BadRecordError()), kind)()
    assert await notes_of(around(source)) == [f"in {source!r}, after 4 items"]


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
@pytest.mark.parametrize("num_items", [0, 1, 3, 5])
@pytest.mark.parametrize("batch_size", [2, 8])
async def test_the_note_counts_the_items_of_a_batch_that_is_not_full(
    kind: str, num_items: int, batch_size: int
) -> None:
    source = getattr(Source(num_items, BadRecordError()), kind)()
    expected = [f"in {source!r}, after {num_items} items"]
    assert await notes_of(batch(source, batch_size)) == expected


async def test_an_error_of_collate_names_the_batch_as_counted_from_the_first_run() -> None:
    assert await notes_of(batch(range(9), 2, collate=failing)) == ["in batch, after 4 items"]
    assert await notes_of(batch(range(5), 2, collate=failing)) == ["in batch, after 4 items"]
    async with batch(range(9), 2, collate=failing) as stage:
        await read_some(stage, 1)
        state = position(stage)
    again = batch(range(9), 2, collate=failing)
    again.load_state_dict(state)
    assert await notes_of(again) == ["in batch, after 4 items"]
