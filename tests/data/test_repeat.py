"""repeat: passes, their number, and orders that differ between them."""

from collections.abc import Callable
from typing import Any

import pytest

from asynchooks import InputError
from asynchooks.data import Stage, prefetch, repeat, shuffle, take

from ..support.afterwards import nothing_left
from .sources import Source, read_all, read_some


@pytest.mark.parametrize(
    ("make", "items"),
    [
        (lambda: repeat([1, 2], 3), [1, 2, 1, 2, 1, 2]),
        (lambda: repeat([1, 2], 0), []),
        (lambda: take(repeat([1, 2]), 5), [1, 2, 1, 2, 1]),
        (lambda: repeat(prefetch(repeat([1], 2), 1), 2), [1, 1, 1, 1]),
        (lambda: repeat([], 10**9), []),
    ],
)
async def test_passes_follow_each_other_and_the_end_may_be_asked_for_again(
    make: Callable[[], Stage[int]], items: list[int]
) -> None:
    async with make() as stage:
        assert await read_some(stage, 9) == items
        assert await read_some(stage, 9) == []
    assert stage.statistics().num_items == len(items), "those of all passes"


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
async def test_every_pass_is_made_once_and_closed_before_the_next_begins(kind: str) -> None:
    source, made = Source(3), list[Any]()

    def make() -> Any:
        made.append(getattr(source, kind)())
        return made[-1]

    async with nothing_left():
        async with repeat(prefetch(make, 2), 3) as items:
            got = []
            async for item in items:
                got.append(item)
                assert source.num_begun - source.num_closed <= 1
    assert got == [0, 1, 2] * 3
    assert len(made) == source.num_begun == source.num_closed == 3
    async with repeat(take(Source(None).items, 2), 3) as items:
        assert await read_some(items, 9) == [0, 1] * 3


@pytest.mark.parametrize(
    "make", [list, lambda: prefetch(shuffle([], 2, 0), 2), lambda: Source(0).items]
)
async def test_an_empty_source_for_ever_is_an_error_and_no_endless_loop(make: Any) -> None:
    async with repeat(make()) as stage:
        for _ in range(2):
            with pytest.raises(InputError, match="is empty, and is to be repeated for ever"):
                await anext(stage)


@pytest.mark.parametrize("num_epochs", [None, 3])
@pytest.mark.parametrize("make", [lambda: iter([0, 1]), Source(2).items, Source(2).items_in_thread])
async def test_a_function_that_returns_the_same_iterator_again_is_an_error(
    make: Callable[[], Any], num_epochs: int | None
) -> None:
    iterator = make()
    async with repeat(lambda: iterator, num_epochs) as items:
        assert await read_some(items, 2) == [0, 1]
        with pytest.raises(InputError, match="gave items, and none in pass 2; .* something new"):
            await anext(items)


async def test_every_pass_has_an_order_of_its_own_and_the_same_in_each_run() -> None:
    got, again = [await read_all(repeat(repeat(shuffle(range(20), 20, 7), 2), 2)) for _ in "12"]
    assert got == again
    passes = [got[at : at + 20] for at in range(0, 80, 20)]
    assert len({tuple(each) for each in passes}) == 4
    assert [sorted(each) for each in passes] == [list(range(20))] * 4
