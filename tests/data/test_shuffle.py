"""shuffle: a permutation that depends on the seed and the size alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asynchooks import InputStateError
from asynchooks.data import batch, prefetch, shuffle, take

from ..support.helpers import settle
from .sources import Source, read_all, read_in_two_lives, read_some

pytestmark = pytest.mark.anyio


async def test_it_is_a_permutation_that_depends_on_seed_and_size() -> None:
    async def read(size: int, seed: int) -> tuple[int, ...]:
        return tuple(await read_all(shuffle(range(50), size, seed)))

    assert await read(10, 3) == await read(10, 3)
    orders = [await read(size, seed) for size in (2, 10, 50, 90) for seed in (0, 1, -1, 2**70)]
    assert all(sorted(each) == list(range(50)) for each in orders)
    assert len(set(orders)) == 12  # from the size of the source on, the size changes nothing
    assert await read(1, 5) == tuple(range(50))


async def test_an_item_comes_no_more_than_the_buffer_earlier() -> None:
    got = await read_all(shuffle(range(200), 8, 4))
    assert all(item <= place + 7 for place, item in enumerate(got))
    assert max(item - place for place, item in enumerate(got)) == 7
    assert any(item < place - 8 for place, item in enumerate(got))


async def test_the_order_does_not_depend_on_how_it_is_read() -> None:
    expected = await read_all(shuffle(range(3000), 30, 4))
    assert await read_all(shuffle(Source(3000).items_in_thread(), 30, 4)) == expected
    assert await read_all(prefetch(shuffle(prefetch(range(3000), 7), 30, 4), 100)) == expected
    batches = await read_all(batch(shuffle(range(3000), 30, 4), 7))
    assert [item for each in batches for item in each] == expected


async def test_a_position_far_in_goes_on_in_the_same_order() -> None:
    expected = await read_all(shuffle(range(3000), 30, 4))
    for around in (lambda stage: stage, lambda stage: take(stage, 5000)):
        make = lambda around=around: around(shuffle(range(3000), 30, 4))  # noqa: E731
        assert await read_in_two_lives(make, 1500) == expected


async def test_a_source_that_has_become_shorter_is_an_error() -> None:
    longer = shuffle(range(20), 8, 1)
    await read_some(longer, 6)
    shorter = shuffle(range(9), 8, 1)
    shorter.load_state_dict(longer.state_dict())
    with pytest.raises(InputStateError, match="ended at item 9"):
        await anext(shorter)


async def test_a_seed_may_be_numpys() -> None:
    seed: Any = np.int64(3)
    assert await read_all(shuffle(range(9), 4, seed)) == await read_all(shuffle(range(9), 4, 3))


@pytest.mark.parametrize("seed", [True, 1.0, "1", None])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(TypeError, match="seed is .*; give an integer"):
        shuffle([1], 1, seed)  # type: ignore[arg-type]


async def test_what_is_drawn_goes_out_though_the_next_item_does_not_come() -> None:
    async with prefetch(shuffle(Source(3, hangs=True).items(), 2, 0), 5) as stage:
        await settle()
        assert stage.statistics().num_buffered == 2


async def test_a_long_pass_is_not_shuffled_the_same_way_again_and_again() -> None:
    got = await read_all(shuffle(range(4 * 1024), 8, 3))
    moved = [item - place for place, item in enumerate(got)]
    first, second = moved[1024:2048], moved[2048:3072]
    same = sum(one == other for one, other in zip(first, second, strict=True))
    assert same < 400
