"""map_concurrent: errors, and leaving it early."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import anyio
import pytest

from asynchooks.data import map_concurrent

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import BadRecordError, Calls, Source, read_all

pytestmark = pytest.mark.anyio


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


async def test_no_call_begins_after_an_error_though_an_item_was_on_its_way() -> None:
    go = anyio.Event()
    calls = Calls()
    calls.errors[0] = BadRecordError()

    async def read() -> AsyncIterator[int]:
        yield 0
        await go.wait()
        yield 1

    async with map_concurrent(calls.__call__, read(), 2) as stage:
        await settle()
        calls.let(0)
        with pytest.raises(BadRecordError):
            await anext(stage)
        go.set()
        await settle()
        assert calls.begun == [0]


@pytest.mark.parametrize(
    "ordered",
    [
        True,
        False,
    ],
)
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


async def test_the_end_of_some_input_within_the_function_is_not_the_end_of_this_one() -> None:
    async def end(item: int) -> int:
        if item == 2:
            raise StopAsyncIteration
        return item

    with pytest.raises(RuntimeError):
        await read_all(map_concurrent(end, range(5), 2))


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


async def test_leaving_never_hangs_as_an_item_is_about_to_begin(anyio_backend_name: str) -> None:
    script = _SCRIPT.format(backend=anyio_backend_name)
    done = subprocess.run([sys.executable, "-c", script], timeout=5, check=False)  # noqa: ASYNC221
    assert done.returncode == 0
