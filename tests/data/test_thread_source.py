"""ThreadSource: one thread, one call at a time, nothing lost by a cancellation."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks.data import Stage, batch, prefetch, repeat, take

from ..support.afterwards import nothing_left
from ..support.helpers import settle
from ..support.threads import own_threads, threads_left
from .sources import BadRecordError, Source, StatefulSync, position, read_all, read_some

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("make", [lambda each: prefetch(each, 3), lambda each: batch(each, 2)])
@pytest.mark.parametrize("num_items", [None, 4])
async def test_a_generator_is_begun_read_and_closed_in_one_thread(
    make: Callable[[Any], Stage[Any]], num_items: int | None
) -> None:
    source = Source(num_items)
    async with nothing_left():
        async with make(source.items_in_thread()) as items:
            await read_some(items, 2)
    assert source.is_closed
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads


@pytest.mark.parametrize("make", [lambda each: prefetch(each, 9), lambda each: take(each, 9)])
async def test_items_before_an_error_come_first_and_it_has_one_note_when_met_again(
    make: Callable[[Any], Stage[Any]],
) -> None:
    error = BadRecordError()
    async with make(Source(3, error).items_in_thread()) as stage:
        assert await read_some(stage, 3) == [0, 1, 2]
        for _ in range(3):
            with pytest.raises(BadRecordError) as caught:
                await anext(stage)
            assert caught.value is error
    assert len(error.__notes__) == 1
    assert "after 3 items" in error.__notes__[0]


async def test_leaving_waits_for_the_call_under_way_and_closes_the_generator() -> None:
    source = Source(2, hangs=True)
    async with nothing_left():
        async with prefetch(source.items_in_thread(), 1) as items:
            await read_some(items, 2)
            source.released.set()
        assert source.is_closed


async def test_what_was_read_is_handed_over_though_the_next_item_does_not_come() -> None:
    source = Source(2, hangs=True)
    got: list[int] = []
    async with prefetch(source.items_in_thread(), 5) as items:
        with anyio.move_on_after(0.3):
            got += [await anext(items), await anext(items)]
        source.released.set()
    assert got == [0, 1]


@pytest.mark.parametrize(
    "items", [[1, 2, 3], (1, 2, 3), range(1, 4), np.arange(3), np.arange(6).reshape(3, 2)]
)
async def test_what_is_in_memory_is_read_along_its_first_axis_without_a_thread(items: Any) -> None:
    for stage in (prefetch(items, 2), take(items, 9), prefetch(take(items, 9), 2)):
        async with stage:
            got = await read_some(stage, 9)
            assert threads_left() == []
        assert np.array_equal(got, items)
    [made] = await read_all(batch(items, 9))
    assert np.array_equal(made, items)


async def test_what_is_not_in_memory_is_read_in_a_thread_that_ends() -> None:
    async with batch(iter([1]), 1) as stage:
        await anext(stage)
        assert threads_left() == ["asynchooks-input"]
    assert threads_left() == []


async def test_a_loop_without_a_block_leaves_no_thread_behind() -> None:
    async def read() -> None:
        async for _ in batch(Source(None).items_in_thread(), 2):
            break

    async with nothing_left():
        await read()
        gc.collect()


async def test_a_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("a\nb\nc\n")
    with path.open() as file:
        async with prefetch(file, 1) as items:
            await anext(items)
        assert file.closed


@pytest.mark.parametrize("around", [lambda file: prefetch(file, 1), lambda file: take(file, 9)])
@pytest.mark.parametrize("way", ["early", "end", "cancelled"])
async def test_a_file_of_anyio_is_closed_as_any_other(
    around: Callable[[Any], Stage[Any]], way: str, tmp_path: Path
) -> None:
    path = anyio.Path(tmp_path / "lines")
    await path.write_text("a\nb\nc\n")
    file = await path.open()
    with anyio.CancelScope() as scope:
        async with around(file) as items:
            assert await anext(items) == "a\n"
            if way == "end":
                assert [each async for each in items] == ["b\n", "c\n"]
            if way == "cancelled":
                scope.cancel()
    assert file.wrapped.closed


async def test_a_file_of_anyio_that_was_not_opened_by_a_pipeline_stays_open(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("a\n")
    async with await anyio.open_file(tmp_path / "lines") as file:
        await prefetch(file, 1).aclose()
        with pytest.raises(TypeError, match="can be read once only"):
            repeat(file)
        assert await read_all(take(file, 1)) == ["a\n"]


async def test_files_of_a_repeated_function_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("a\nb\n")
    opened: list[Any] = []

    def lines() -> Any:
        opened.append(path.open())
        return opened[-1]

    got = await read_all(take(repeat(lines), 5))
    are_closed = [file.closed for file in opened]
    for file in opened:
        file.close()
    assert got == ["a\n", "b\n", "a\n", "b\n", "a\n"]
    assert are_closed == [True] * len(opened)


async def test_a_call_that_does_not_end_is_left_alone_and_closed_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynchooks.data._thread_source._GRACE_SECS", 0.05)
    source = Source(1, hangs=True)
    stage = prefetch(source.items_in_thread(), 1)
    try:
        async with stage:
            await anext(stage)
    finally:
        source.released.set()
    for thread in own_threads("asynchooks-input"):
        await anyio.to_thread.run_sync(thread.join, 5)
    assert source.is_closed


async def test_the_state_behind_the_last_item_is_kept_however_many_were_read() -> None:
    async with take(StatefulSync(9), 9) as items:
        for count in range(1, 7):
            await anext(items)
            assert position(items)["source"] == {"stage": "iterable", "state": {"at": count}}


class Gates:
    """An iterator each of whose items has a gate."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._at = 0
        self.are_asked = [threading.Event() for _ in range(num_items)]
        self.gates = [threading.Event() for _ in range(num_items)]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._at == self._num_items:
            raise StopIteration
        at = self._at
        self.are_asked[at].set()
        assert self.gates[at].wait(10)
        self._at += 1
        return at

    async def until_asked(self, place: int, secs: float = 10.0) -> bool:
        return await anyio.to_thread.run_sync(self.are_asked[place].wait, secs)


@pytest.mark.parametrize(
    ("make", "reads_ahead"),
    [(lambda each: take(each, 4), False), (lambda each: prefetch(each, 1), True)],
)
async def test_however_often_a_wait_is_cancelled_one_item_is_asked_for_and_none_is_lost(
    make: Callable[[Any], Stage[Any]], reads_ahead: bool
) -> None:
    source = Gates(4)
    async with make(source) as items:
        for _ in range(3):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(anext, items)
                    assert await source.until_asked(0)
                    await settle()
                    scope.cancel()
        source.gates[0].set()
        assert await anext(items) == 0
        assert await source.until_asked(1, 10.0 if reads_ahead else 0.1) == reads_ahead
        for gate in source.gates:
            gate.set()
        assert [item async for item in items] == [1, 2, 3]


async def test_an_item_that_was_waited_for_long_comes_at_once_and_not_with_the_next() -> None:
    source = Gates(3)
    stage: Any = prefetch(source, 3)
    got: list[int] = []

    async def one() -> None:
        got.append(await anext(stage))

    async with stage:
        try:
            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    group.start_soon(one)
                    assert await source.until_asked(0)
                    await anyio.sleep(0.01)  # longer than it waits for all that it asked for
                    source.gates[0].set()
        finally:
            for gate in source.gates:
                gate.set()
    assert got == [0]


async def test_leaving_waits_for_the_call_under_way_and_for_no_other() -> None:
    source = Gates(5)

    async def let_all_go() -> None:
        await settle()  # the block is being left
        for gate in source.gates:
            gate.set()

    async with anyio.create_task_group() as group:
        async with prefetch(source, 5):
            assert await source.until_asked(0)
            group.start_soon(let_all_go)
    assert not source.are_asked[1].is_set()
