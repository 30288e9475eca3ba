"""shuffle: a permutation that depends on the seed and the size alone."""

from asynchooks.data import batch, prefetch, shuffle, take

from ..support.helpers import settle
from .sources import Source, read_all, read_in_two_lives


async def test_it_is_a_permutation_that_depends_on_seed_and_size() -> None:
    async def read(size: int, seed: int) -> tuple[int, ...]:
        return tuple(await read_all(shuffle(range(50), size, seed)))

    assert await read(10, 3) == await read(10, 3)
    orders = [await read(size, seed) for size in (2, 10, 50, 90) for seed in (0, 1, -1, 2**70)]
    assert all(sorted(each) == list(range(50)) for each in orders)
    assert len(set(orders)) == 12  # from the size of the source on, the size changes nothing
    assert await read(1, 5) == tuple(range(50))


async def test_an_item_comes_no_more_than_the_buffer_earlier_and_no_block_as_the_one_before() -> (
    None
):
    got = await read_all(shuffle(range(3 * 1024), 8, 4))
    moved = [item - place for place, item in enumerate(got)]
    assert max(moved) == 7
    assert min(moved) < -8
    same = sum(one == other for one, other in zip(moved[:1024], moved[1024:2048], strict=True))
    assert same < 400


async def test_the_order_depends_neither_on_how_it_is_read_nor_on_restores() -> None:
    expected = await read_all(shuffle(range(1500), 30, 4))
    assert await read_all(shuffle(Source(1500).items_in_thread(), 30, 4)) == expected
    assert await read_all(prefetch(shuffle(prefetch(range(1500), 7), 30, 4), 100)) == expected
    batches = await read_all(batch(shuffle(range(1500), 30, 4), 7))
    assert [item for each in batches for item in each] == expected
    for around in (lambda stage: stage, lambda stage: take(stage, 5000)):
        make = lambda around=around: around(shuffle(range(1500), 30, 4))  # noqa: E731
        assert await read_in_two_lives(make, 1200) == expected


async def test_what_is_drawn_goes_out_though_the_next_item_does_not_come() -> None:
    async with prefetch(shuffle(Source(3, hangs=True).items(), 2, 0), 5) as stage:
        await settle()
        assert stage.statistics().num_buffered == 2
