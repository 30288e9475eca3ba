"""map_concurrent: several items at a time, in tasks or threads; its failures and ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks.data import map_concurrent

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import BadRecordError, Calls, Source, read_all, same

pytestmark = pytest.mark.anyio


async def test_calls_overlap_and_results_keep_the_order_of_items() -> None:
    calls = Calls()
    got: list[int] = []

    async def read() -> None:
        async for item in stage:
            got.append(item)

    async with map_concurrent(calls.__call__, range(5), 3) as stage:
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await settle()
            assert calls.begun == [0, 1, 2]
            found = stage.statistics()
            assert (found.num_buffered, found.buffer_size, found.num_items) == (3, 3, 0)
            calls.let(2, 1)
            await settle()
            assert got == []
            assert calls.begun == [0, 1, 2]  # those that are done count
            calls.let(0)
            await settle()
            assert got == [0, 10, 20]
            assert calls.begun == [0, 1, 2, 3, 4]
            calls.let(3, 4)
    assert got == [0, 10, 20, 30, 40]


async def test_results_without_order_come_as_they_are_done() -> None:
    calls = Calls()
    async with map_concurrent(calls.__call__, range(4), 2, ordered=False) as stage:
        await settle()
        calls.let(1)
        assert await anext(stage) == 10
        await settle()
        assert calls.begun == [0, 1, 2]
        calls.let(2, 0)
        await settle()
        calls.let(*calls.begun)
        assert sorted([await anext(stage), await anext(stage)]) == [0, 20]
        await settle()
        calls.let(3)
        assert await anext(stage) == 30
        with pytest.raises(StopAsyncIteration):
            await anext(stage)


async def test_a_plain_function_runs_in_several_threads_at_once_and_none_stands_still() -> None:
    both = threading.Barrier(2)
    threads: set[int] = set()

    def work(item: int) -> int:
        threads.add(threading.get_ident())
        both.wait(5)  # calls wait for each other in pairs
        return -item

    for _ in range(5):
        threads.clear()
        async with nothing_left():
            expected = [-item for item in range(100)]
            assert await read_all(map_concurrent(work, range(100), 2)) == expected
        assert len(threads) == 2
        assert threading.get_ident() not in threads


async def double(item: int, by: int) -> int:
    await anyio.lowlevel.checkpoint()
    return by * item


@pytest.mark.parametrize(
    "fn",
    [
        partial(double, by=2),
        lambda item: double(item, 2),
        lambda item: 2 * item if item < 100 else double(item, 2),
    ],
)
@pytest.mark.parametrize("concurrency", [2, 40])
async def test_a_function_that_returns_awaitables_always_or_later_has_them_awaited(
    fn: Callable[[int], Any], concurrency: int
) -> None:
    expected = [2 * item for item in range(200)]
    assert await read_all(map_concurrent(fn, range(200), concurrency)) == expected


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)
@given(
    num_items=st.integers(0, 20),
    concurrency=st.integers(1, 5),
    ordered=st.booleans(),
    waits=st.lists(st.integers(0, 4), min_size=20, max_size=20),
    pauses=st.lists(st.integers(0, 3), min_size=20, max_size=20),
)
async def test_it_never_holds_more_than_its_concurrency(
    num_items: int, concurrency: int, ordered: bool, waits: list[int], pauses: list[int]
) -> None:
    num_held = 0
    most = 0
    got: list[int] = []

    async def read() -> AsyncIterator[int]:
        nonlocal num_held, most
        for each in range(num_items):
            num_held += 1
            most = max(most, num_held)
            yield each

    async def wait(item: int) -> int:
        for _ in range(waits[item]):
            await anyio.lowlevel.checkpoint()
        return item

    async with map_concurrent(wait, read(), concurrency, ordered) as stage:
        async for item in stage:
            num_held -= 1
            got.append(item)
            for _ in range(pauses[item]):
                await anyio.lowlevel.checkpoint()
    assert (got if ordered else sorted(got)) == list(range(num_items))
    assert most <= concurrency


def test_bad_arguments_say_what_to_give() -> None:
    with pytest.raises(TypeError, match="fn is 3; give a function that takes an item"):
        map_concurrent(3, [1], 1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="concurrency is 0; give an integer >= 1"):
        map_concurrent(str, [1], 0)
    unclear: Any = "no"
    with pytest.raises(TypeError, match="ordered is 'no'; give True or False"):
        map_concurrent(len, [[1]], 2, unclear)


async def test_quick_calls_before_a_slow_one_keep_all_results_in_order() -> None:
    def work(item: int) -> int:
        if item % 40 == 0:
            time.sleep(0.002)
        return item

    for ordered in (True, False):
        async with nothing_left():
            got = await read_all(map_concurrent(work, range(800), 8, ordered))
        assert (got if ordered else sorted(got)) == list(range(800))


@pytest.mark.parametrize("is_async", [True, False])
async def test_results_before_an_error_come_first_and_the_error_names_the_item(
    is_async: bool,
) -> None:
    error = BadRecordError("bad")

    def fail(item: int) -> int:
        if item == 3:
            raise error
        return item

    async def fail_async(item: int) -> int:
        await anyio.lowlevel.checkpoint()
        return fail(item)

    source, got = Source(None), []
    async with nothing_left():
        with pytest.raises(BadRecordError, match="bad") as caught:
            async with map_concurrent(fail_async if is_async else fail, source.items(), 3) as stage:
                async for item in stage:
                    got.append(item)
    assert caught.value is error
    assert error.__notes__ == ["in map_concurrent, at item 3"]
    assert got == [0, 1, 2]
    assert source.is_closed


async def test_an_early_error_waits_for_earlier_items_and_cancels_later_ones() -> None:
    calls = Calls()
    calls.errors[1] = BadRecordError()
    async with map_concurrent(calls.__call__, range(9), 3) as stage:
        await settle()
        calls.let(1)
        await settle()
        assert sorted(calls.ended) == [1, 2]
        calls.let(0)
        assert await anext(stage) == 0
        with pytest.raises(BadRecordError):
            await anext(stage)
        assert calls.begun == [0, 1, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
async def test_an_exit_of_the_process_waits_for_no_earlier_item(error: BaseException) -> None:
    calls = Calls()
    calls.errors[2] = error
    async with nothing_left():
        async with map_concurrent(calls.__call__, range(9), 3) as stage:
            for item in (0, 2):
                await settle()
                calls.let(item)
            await settle()
            assert await anext(stage) == 0, "it was ready"
            with pytest.raises(type(error)) as caught:
                await anext(stage)
    assert caught.value is error
    assert calls.begun == [0, 1, 2]


@pytest.mark.parametrize(("ordered", "item"), [(True, 1), (False, 2)])
async def test_an_error_that_several_items_raise_names_the_one_that_it_comes_out_for(
    ordered: bool, item: int
) -> None:
    calls, error = Calls(), BadRecordError()
    calls.errors = {1: error, 2: error}
    async with map_concurrent(calls.__call__, range(9), 3, ordered) as stage:
        for let in (2, 0, 1):
            await settle()
            if ordered or let == 2:
                calls.let(let)
        with pytest.raises(BadRecordError):
            while True:
                await anext(stage)
    assert error.__notes__ == [f"in map_concurrent, at item {item}"]


@pytest.mark.parametrize("ordered", [True, False])
async def test_items_before_an_error_of_the_source_are_still_mapped(ordered: bool) -> None:
    calls = Calls()
    error = BadRecordError()
    async with map_concurrent(calls.__call__, Source(2, error).items(), 3, ordered) as stage:
        await settle()
        assert calls.begun == [0, 1]
        calls.let(0, 1)
        assert sorted([await anext(stage), await anext(stage)]) == [0, 10]
        with pytest.raises(BadRecordError):
            await anext(stage)


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


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("error", [ValueError("five"), SystemExit(3)])
async def test_the_first_error_leaves_and_the_generator_ends(
    ordered: bool, error: BaseException
) -> None:
    async def fn(item: int) -> int:
        if item == 5:
            raise error
        return item if item < 4 else await same(item)

    source = Source(None)
    async with nothing_left():
        with pytest.raises(type(error)) as caught:
            await read_all(map_concurrent(fn, source.items(), 4, ordered))
    assert caught.value is error
    assert source.is_closed


async def test_leaving_ends_calls_that_are_under_way() -> None:
    calls = Calls()
    async with nothing_left():
        async with map_concurrent(calls.__call__, Source(None).items(), 3):
            await settle()
            assert calls.ended == []
        assert sorted(calls.ended) == [0, 1, 2]


_SCRIPT = """
import anyio
from asynchooks.data import map_concurrent

async def main():
    go = anyio.Event()

    async def read():
        yield 0
        with anyio.CancelScope(shield=True):
            await go.wait()
        while True:
            yield 1

    async def let_go():
        await anyio.wait_all_tasks_blocked()  # the block is being left
        go.set()

    async def wait(item):
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        async with map_concurrent(wait, read(), 3):
            await anyio.wait_all_tasks_blocked()
            group.start_soon(let_go)

anyio.run(main, backend={backend!r})
"""


@pytest.mark.faults
async def test_leaving_never_hangs_as_an_item_is_about_to_begin(anyio_backend_name: str) -> None:
    script = _SCRIPT.format(backend=anyio_backend_name)
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)  # noqa: ASYNC221
    assert done.returncode == 0


async def test_items_that_were_read_and_not_begun_are_left_alone_after_an_error() -> None:
    begun: list[int] = []
    go = anyio.Event()

    async def fn(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise BadRecordError
        await go.wait()
        return item

    async with nothing_left():
        async with map_concurrent(fn, range(9), 3) as stage:
            while 1 not in begun:
                await anyio.lowlevel.checkpoint()
            go.set()
            assert await anext(stage) == 0
            with pytest.raises(BadRecordError):
                await anext(stage)
    assert begun == [0, 1]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("is_shielded", [False, True])
async def test_no_call_begins_after_an_error_though_an_item_was_on_its_way(
    failing: int, is_shielded: bool
) -> None:
    calls, go = Calls(), anyio.Event()
    calls.errors[failing] = BadRecordError()

    async def source() -> AsyncIterator[int]:
        yield 0
        yield 1
        with anyio.CancelScope(shield=is_shielded):
            await go.wait()
        yield 2

    async with map_concurrent(calls.__call__, source(), 9) as stage:
        await settle()
        calls.let(failing)
        await settle()
        go.set()
        await settle()
        if failing:
            calls.let(0)  # the error waits for it
            assert await anext(stage) == 0
        with pytest.raises(BadRecordError):
            await anext(stage)
    assert calls.begun == [0, 1]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_source_that_hangs_is_closed_as_soon_as_a_call_has_failed(ordered: bool) -> None:
    source, go = Source(2, hangs=True), anyio.Event()

    async def fn(item: int) -> int:
        await go.wait()
        raise BadRecordError

    async with map_concurrent(fn, source.items(), 3, ordered) as stage:
        await settle()
        go.set()
        with pytest.raises(BadRecordError):
            await anext(stage)
        await settle()
        assert source.is_closed


async def test_a_thread_that_works_on_several_items_reads_no_more_than_there_is_room() -> None:
    taken = 0
    async with map_concurrent(abs, range(300), 8) as stage:
        async for _ in stage:
            taken += 1
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
                found = stage.statistics()
                assert found.num_buffered <= found.buffer_size == 8
                assert found.sources[0].num_items <= taken + 8
    assert taken == 300


@pytest.mark.parametrize("place", [100, 150])
async def test_a_thread_whose_call_has_failed_takes_no_further_item(place: int) -> None:
    begun: list[tuple[int, int]] = []

    def fn(item: int) -> int:
        begun.append((threading.get_ident(), item))
        if item == place:
            raise BadRecordError
        return item

    got: list[int] = []
    with pytest.raises(BadRecordError):
        async with map_concurrent(fn, range(400), 40) as stage:
            async for item in stage:
                got.append(item)
    assert got == list(range(place))
    failed = next(thread for thread, item in begun if item == place)
    assert max(item for thread, item in begun if thread == failed) == place


async def test_items_behind_one_that_takes_long_go_to_other_threads() -> None:
    is_begun = threading.Event()

    def fn(item: int) -> bool:
        if item == 150:
            return is_begun.wait(5)
        if item > 170:
            is_begun.set()
        until = time.perf_counter() + 1e-4  # so that a thread takes some at a time, but not all
        while time.perf_counter() < until:
            pass
        return True

    async with map_concurrent(fn, range(200), 40) as stage:
        assert all([is_in_time async for is_in_time in stage])


async def test_what_a_plain_function_returns_is_awaited_by_as_many_tasks_as_may_be() -> None:
    calls = Calls()
    with anyio.fail_after(10):
        async with map_concurrent(lambda item: calls(item), range(80), 8) as stage:
            for at in range(0, 80, 8):
                while len(calls.begun) < at + 8:
                    await anyio.lowlevel.checkpoint()
                calls.let(*range(at, at + 8))
                assert [await anext(stage) for _ in range(8)] == list(
                    range(10 * at, 10 * at + 80, 10)
                )
