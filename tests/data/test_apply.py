"""map and filter, and how many calls of a stage may fail."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import FeedHook, MonitoredSession, SharedSessionCreator, StopTraining, data
from asynchooks.data import Stage, batch, map_concurrent, prefetch, repeat, take

from ..support.faults import Halt
from .sources import (
    BadRecordError,
    Calls,
    Source,
    StatefulSync,
    position,
    read_all,
    read_in_lives,
    read_in_two_lives,
    read_some,
)

pytestmark = pytest.mark.anyio

untyped: Any = data


def ten_times(item: int) -> int:
    return 10 * item


async def ten_times_async(item: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 10 * item


def is_even(item: int) -> bool:
    return item % 2 == 0


async def is_even_async(item: int) -> bool:
    await anyio.lowlevel.checkpoint()
    return item % 2 == 0


@pytest.mark.parametrize("fn", [ten_times, ten_times_async, lambda item: ten_times_async(item)])
async def test_a_map_calls_a_function_with_one_item_after_the_other(fn: Any) -> None:
    assert await read_all(data.map(range(5), fn)) == [0, 10, 20, 30, 40]
    assert await read_all(data.map(Source(3).items(), fn)) == [0, 10, 20]
    assert await read_all(prefetch(data.map(Source(3).items_in_thread(), fn), 2)) == [0, 10, 20]
    assert await read_all(data.map([], fn)) == []


@pytest.mark.parametrize("fn", [is_even, is_even_async, lambda item: np.bool_(item % 2 == 0)])
async def test_a_filter_keeps_items_of_which_something_true_is_said(fn: Any) -> None:
    assert await read_all(data.filter(range(6), fn)) == [0, 2, 4]
    assert await read_all(prefetch(data.filter(Source(6).items(), fn), 4)) == [0, 2, 4]
    assert await read_all(batch(data.filter(range(9), fn), 2)) == [[0, 2], [4, 6], [8]]
    assert await read_all(data.filter([1, 3], fn)) == []


async def test_no_more_is_read_than_asked_for() -> None:
    source = Source(None)
    assert await read_all(take(data.map(source.items(), ten_times), 3)) == [0, 10, 20]
    assert source.num_read == 3


PIPELINES: dict[str, Callable[[], Stage[Any]]] = {
    "map": lambda: data.map(range(7), ten_times),
    "async map": lambda: data.map(Source(7).items(), ten_times_async),
    "filter": lambda: data.filter(StatefulSync(9), is_even),
    "async filter": lambda: data.filter(range(9), is_even_async),
    "both, prefetched": lambda: prefetch(
        batch(data.map(data.filter(Source(20).items(), is_even), ten_times), 3), 4
    ),
    "repeated": lambda: repeat(data.map(data.filter(range(5), is_even), ten_times_async), 3),
    "with failures": lambda: data.map(range(9), fails_at(2, 3, 8), max_failures=3),
}


def fails_at(*items: int) -> Callable[[int], int]:
    def fn(item: int) -> int:
        if item in items:
            raise BadRecordError(item)
        return 10 * item

    return fn


@pytest.mark.parametrize("name", PIPELINES)
async def test_a_pipeline_goes_on_behind_any_item(name: str) -> None:
    make = PIPELINES[name]
    whole = await read_all(make())
    for first in range(len(whole) + 1):
        assert await read_in_two_lives(make, first) == whole
        assert await read_in_lives((make(), first), (make(), 1), (make(), 99)) == whole


async def test_a_cancellation_enters_the_function_and_loses_no_item() -> None:
    calls = Calls()
    async with data.map(range(3), calls) as stage:
        with anyio.move_on_after(0.01):
            await anext(stage)
        assert (calls.begun, calls.ended) == ([0], [0])
        state = position(stage)
        async with anyio.create_task_group() as group:
            group.start_soon(_let, calls, 0)
            assert await anext(stage) == 0
        assert calls.begun == [0, 0]
    again = data.map(range(3), ten_times)
    again.load_state_dict(state)
    assert await read_all(again) == [0, 10, 20]


async def _let(calls: Calls, item: int) -> None:
    while len(calls.begun) < 2:
        await anyio.lowlevel.checkpoint()
    calls.let(item)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("make", [data.map, data.filter])
async def test_an_error_comes_behind_all_results_with_a_note(make: Any, is_async: bool) -> None:
    def plain(item: int) -> int:
        return fails_at(5)(item) or 1

    async def awaited(item: int) -> int:
        return plain(item)

    stage = batch(make(range(9), awaited if is_async else plain), 2)
    assert len(await read_some(stage, 2)) == 2
    with pytest.raises(BadRecordError) as caught:
        await anext(stage)
    assert f"in {stage.statistics().sources[0].stage}, at item 5" in caught.value.__notes__


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, GeneratorExit])
async def test_the_end_of_an_iterator_does_not_pass_for_the_end(error: type[BaseException]) -> None:
    def fn(item: int) -> int:
        raise error

    with pytest.raises(RuntimeError):
        await read_all(data.map(range(3), fn))


class BadTruth:
    def __bool__(self) -> bool:
        raise BadRecordError("no truth")


async def test_what_has_no_truth_is_an_error_of_the_predicate() -> None:
    with pytest.raises(BadRecordError):
        await read_all(data.filter([BadTruth()], lambda item: item))
    assert await read_all(data.filter([BadTruth()], lambda item: item, max_failures=1)) == []


async def test_workers_with_feed_hooks_share_them() -> None:
    seen: list[int] = []

    async def step(x: int) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        seen.append(x)
        return {}

    source = data.map(data.filter(range(40), is_even_async), ten_times)
    creator = SharedSessionCreator(step, num_workers=3)

    async def worker() -> None:
        async with MonitoredSession([FeedHook(source, "x")], creator) as session:
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(worker)
    assert Counter(seen) == Counter(range(0, 400, 20))


async def _async(fn: Callable[[int], int], item: int) -> int:
    await anyio.lowlevel.checkpoint()
    return fn(item)


FAILING: dict[str, Callable[..., Stage[Any]]] = {
    "map": data.map,
    "async map": lambda source, fn, **more: data.map(source, lambda x: _async(fn, x), **more),
    "filter": data.filter,
    "map_concurrent": lambda source, fn, **more: map_concurrent(
        lambda item: _async(fn, item), source, 3, **more
    ),
    "in threads": lambda source, fn, **more: map_concurrent(fn, source, 3, **more),
    "unordered": lambda source, fn, **more: map_concurrent(fn, source, 3, ordered=False, **more),
}


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("num_allowed", [0, 2, 3, 9])
async def test_so_many_calls_in_all_may_fail_and_the_next_error_is_raised(
    kind: str, num_allowed: int, caplog: pytest.LogCaptureFixture
) -> None:
    bad = (2, 3, 8, 30)
    stage = FAILING[kind](range(1, 60), fails_at(*bad), max_failures=num_allowed)
    got: list[int] = []
    with caplog.at_level(logging.WARNING):
        try:
            async with stage:
                async for each in stage:
                    got.append(each)
        except BadRecordError as error:
            assert num_allowed < len(bad)
            assert "item" in error.__notes__[0]
            if kind != "unordered":
                assert error.args == (bad[num_allowed],)
        else:
            assert num_allowed >= len(bad)
            factor = 1 if kind == "filter" else 10
            assert sorted(got) == [factor * each for each in range(1, 60) if each not in bad]
    num_left_out = min(num_allowed, len(bad))
    assert stage.statistics().num_failures == num_left_out
    left_out = [each.message for each in caplog.records if "is left out, failure" in each.message]
    assert len(left_out) == num_left_out
    if num_allowed:
        assert left_out[0].startswith("Item 1 of") or kind not in ("map", "filter")
        assert "BadRecordError" in left_out[0]


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("error", [StopTraining("enough"), Halt()])
async def test_a_stop_and_an_exit_are_no_failures(kind: str, error: BaseException) -> None:
    def fn(item: int) -> int:
        raise error

    stage = FAILING[kind](range(5), fn, max_failures=9)
    with pytest.raises(type(error)):
        await read_all(stage)
    assert stage.statistics().num_failures == 0


async def test_calls_of_later_passes_count_as_well() -> None:
    stage = repeat(data.map(range(3), fails_at(1), max_failures=2))
    got: list[int] = []
    with pytest.raises(BadRecordError):
        async for each in stage:
            got.append(each)
    assert got == [0, 20, 0, 20, 0]


async def test_the_place_in_a_warning_is_that_of_the_pass_also_behind_a_restore(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> Stage[int]:
        return data.map(range(9), fails_at(6), max_failures=1)

    with caplog.at_level(logging.WARNING):
        assert await read_in_two_lives(make, 4) == [0, 10, 20, 30, 40, 50, 70, 80]
    assert [each.message[:10] for each in caplog.records] == ["Item 6 of "]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: untyped.map([1], 3), TypeError, "^fn is 3; give a function that takes an item"),
        (lambda: untyped.filter([1], None), TypeError, "^predicate is None; give a function"),
        (lambda: untyped.map(3, str), TypeError, "^source is 3; give a stage"),
        (lambda: untyped.map([1], str, max_failures=-1), ValueError, "^max_failures is -1; give"),
        (
            lambda: untyped.filter([1], str, max_failures=0.5),
            TypeError,
            "^max_failures is 0.5; give",
        ),
        (
            lambda: map_concurrent(str, [1], 2, max_failures=True),
            TypeError,
            "^max_failures is True; give",
        ),
    ],
)
def test_wrong_arguments_are_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
