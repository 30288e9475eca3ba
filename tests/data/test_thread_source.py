"""ThreadSource: one thread, one call at a time, nothing lost by a cancellation."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks.data import Stage, batch, prefetch, take

from ..support.afterwards import nothing_left
from ..support.threads import own_threads, threads_left
from .sources import Source, read_all, read_some


@pytest.mark.parametrize("make", [lambda each: prefetch(each, 3), lambda each: batch(each, 2)])
@pytest.mark.parametrize("num_items", [None, 4])
async def test_a_generator_is_begun_read_and_closed_in_one_thread(
    make: Callable[[Any], Stage[Any]], num_items: int | None
) -> None:
    source = Source(num_items)
    async with nothing_left():
        async with make(source.items_in_thread()) as items:
            await read_some(items, 2)
            assert threads_left() == ["asynchooks-input"]
    assert source.is_closed
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads


async def test_what_was_read_is_handed_over_though_the_next_item_does_not_come() -> None:
    source = Source(2, hangs=True)
    async with prefetch(source.items_in_thread(), 5) as items:
        assert await read_some(items, 2) == [0, 1]
        source.released.set()


@pytest.mark.parametrize("items", [[1, 2, 3], (1, 2, 3), range(1, 4), np.arange(6).reshape(3, 2)])
async def test_what_is_in_memory_is_read_along_its_first_axis_without_a_thread(items: Any) -> None:
    async with prefetch(take(items, 9), 2) as stage:
        got = await read_some(stage, 9)
        assert threads_left() == []
    assert np.array_equal(got, items)
    [made] = await read_all(batch(items, 9))
    assert np.array_equal(made, items)


async def test_a_loop_without_a_block_leaves_no_thread_behind() -> None:
    async def read() -> None:
        async for _ in batch(Source(None).items_in_thread(), 2):
            break

    async with nothing_left():
        await read()
        gc.collect()


@pytest.mark.parametrize("around", [lambda file: prefetch(file, 1), lambda file: take(file, 9)])
@pytest.mark.parametrize("way", ["early", "end", "cancelled"])
@pytest.mark.parametrize("is_anyios", [False, True])
async def test_a_file_is_closed(
    around: Callable[[Any], Stage[Any]], way: str, is_anyios: bool, tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("a\nb\nc\n")
    file: Any = await anyio.open_file(lines) if is_anyios else lines.open()
    with anyio.CancelScope() as scope:
        async with around(file) as items:
            assert await anext(items) == "a\n"
            if way == "end":
                assert [each async for each in items] == ["b\n", "c\n"]
            if way == "cancelled":
                scope.cancel()
    assert (file.wrapped if is_anyios else file).closed


async def test_a_call_that_does_not_end_is_left_alone_and_closed_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # private: such a call has 10 s, in real time as it is one of a thread
    monkeypatch.setattr("asynchooks.data._thread_source._GRACE_SECS", 0.05)
    source = Source(1, hangs=True)
    try:
        async with prefetch(source.items_in_thread(), 1) as stage:
            await anext(stage)
    finally:
        source.released.set()
    for thread in own_threads("asynchooks-input"):
        await anyio.to_thread.run_sync(thread.join, 5)
    assert source.is_closed
