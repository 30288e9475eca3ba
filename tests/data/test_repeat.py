"""repeat: passes, their number, and orders that differ between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import InputError
from asynchooks.data import Stage, interleave, prefetch, repeat, shuffle, take

from ..support.afterwards import nothing_left
from .sources import Source, read_all, read_in_two_lives, read_some

pytestmark = pytest.mark.anyio


async def test_passes_follow_each_other() -> None:
    assert await read_all(repeat([1, 2], 3)) == [1, 2, 1, 2, 1, 2]
    assert await read_all(repeat([1, 2], 0)) == []
    assert await read_all(take(repeat([1, 2]), 5)) == [1, 2, 1, 2, 1]
    assert await read_all(repeat(prefetch(repeat([1], 2), 1), 2)) == [1, 1, 1, 1]


async def test_each_pass_of_a_prefetch_has_a_task_of_its_own_that_ends() -> None:
    source = Source(3)
    async with nothing_left():
        async with repeat(prefetch(source.items, 2), 3) as items:
            assert [item async for item in items] == [0, 1, 2] * 3
    assert source.num_begun == source.num_closed


async def test_a_function_is_called_once_for_each_pass() -> None:
    num_calls = 0

    def source() -> list[int]:
        nonlocal num_calls
        num_calls += 1
        return [1]

    assert await read_all(repeat(source, 3)) == [1, 1, 1]
    assert num_calls == 3


async def test_an_empty_source_for_ever_is_an_error_and_no_endless_loop() -> None:
    for stage in (repeat([]), prefetch(repeat(shuffle([], 2, 0)), 2), repeat(Source(0).items)):
        with pytest.raises(InputError, match="is empty, and is to be repeated for ever"):
            await read_all(stage)
    assert await read_all(repeat([], 10**9)) == []


@pytest.mark.parametrize("num_epochs", [None, 3])
@pytest.mark.parametrize("make", [lambda: iter([0, 1]), Source(2).items, Source(2).items_in_thread])
async def test_a_function_that_returns_the_same_iterator_again_is_an_error(
    make: Callable[[], Any], num_epochs: int | None
) -> None:
    iterator, got = make(), []
    with pytest.raises(InputError, match="gave items, and none in pass 2; .* something new each"):
        async with repeat(lambda: iterator, num_epochs) as items:
            async for item in items:
                got.append(item)
    assert got == [0, 1]


async def test_every_pass_has_an_order_of_its_own_and_the_same_in_each_run() -> None:
    runs = [await read_all(repeat(shuffle(range(20), 20, 7), 3)) for _ in range(2)]
    assert runs[0] == runs[1]
    passes = [runs[0][at : at + 20] for at in (0, 20, 40)]
    assert len({tuple(each) for each in passes}) == 3
    assert [sorted(each) for each in passes] == [list(range(20))] * 3


async def test_passes_within_passes_have_orders_of_their_own() -> None:
    got = await read_all(repeat(repeat(shuffle(range(20), 20, 7), 2), 2))
    assert len({tuple(got[at : at + 20]) for at in range(0, 80, 20)}) == 4


async def test_repeated_shuffles_beside_each_other_keep_their_seeds() -> None:
    both = interleave([repeat(shuffle(range(20), 20, seed), 2) for seed in (1, 2)])
    got = await read_all(both)
    assert got[::2] == await read_all(repeat(shuffle(range(20), 20, 1), 2))
    assert got[1::2] == await read_all(repeat(shuffle(range(20), 20, 2), 2))


async def test_a_position_at_the_end_of_a_pass_goes_on_with_the_next() -> None:
    def make(size: int) -> Stage[int]:
        return prefetch(repeat(shuffle(range(4), 4, 1), 3), size)

    whole = await read_in_two_lives(lambda: make(9), 4, lambda: make(1))
    assert whole == await read_all(repeat(shuffle(range(4), 4, 1), 3))


async def test_a_position_beyond_the_last_epoch_is_the_end() -> None:
    assert (
        len(await read_in_two_lives(lambda: repeat([1, 2], 5), 7, lambda: repeat([1, 2], 2))) == 7
    )


async def test_what_take_left_of_a_pass_is_closed_before_the_next_begins() -> None:
    source = Source(None)
    async with repeat(take(source.items, 2), 3) as items:
        async for _ in items:
            assert source.num_begun - source.num_closed == 1


async def test_statistics_are_those_of_all_passes() -> None:
    async with repeat(take(lambda: [1, 2, 3], 3), 2) as stage:
        assert await read_some(stage, 5) == [1, 2, 3, 1, 2]
        found = stage.statistics()
    assert (found.num_items, found.sources[0].num_items) == (5, 5)


async def test_its_end_may_be_asked_for_again() -> None:
    async with repeat([1, 2], 2) as stage:
        assert await read_some(stage, 9) == [1, 2, 1, 2]
        assert await read_some(stage, 9) == []
    async with repeat(list[int](), None) as stage:
        for _ in range(2):
            with pytest.raises(InputError, match="is empty, and is to be repeated for ever"):
                await anext(stage)


async def test_two_readers_share_its_passes_and_both_see_the_end() -> None:
    got: list[int] = []

    async def read() -> None:
        got.extend([item async for item in stage])

    async with repeat(Source(3).items, 2) as stage, anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(read)
    assert sorted(got) == [0, 0, 1, 1, 2, 2]


async def test_it_goes_on_though_the_closing_of_a_pass_was_cancelled() -> None:
    scope = anyio.CancelScope()

    class Closing:
        def __init__(self) -> None:
            self.left = [1, 2]

        async def __anext__(self) -> int:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop(0)

        async def aclose(self) -> None:
            scope.cancel()
            await anyio.lowlevel.checkpoint()

    class Records:
        def __aiter__(self) -> Any:
            return Closing()

    async with repeat(Records(), 2) as stage:
        assert await read_some(stage, 2) == [1, 2]
        with scope:
            await anext(stage)
        assert scope.cancelled_caught
        assert await read_some(stage, 2) == [1, 2]
