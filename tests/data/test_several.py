"""interleave, zip, chain and mix: several sources in one pipeline."""

from collections import Counter

import pytest

from asynchooks import InputStructureError, data
from asynchooks.data import Stage, chain, interleave, mix, prefetch, repeat

from ..support.helpers import cancelled_when_settled, settle
from .sources import Source, position, read_all, read_in_two_lives


async def test_interleave_takes_turns_and_leaves_out_what_has_ended() -> None:
    stage = interleave([range(1), Source(4).items(), range(10, 12), []])
    assert await read_all(stage) == [0, 0, 10, 1, 11, 2, 3]


async def test_zip_ends_with_the_shortest() -> None:
    assert await read_all(data.zip(range(3), ["abcd"], [7, 8])) == [(0, "abcd", 7)]
    assert await read_all(data.zip(range(3), Source(2).items())) == [(0, 0), (1, 1)]


@pytest.mark.parametrize(("lengths", "ended", "longer"), [((3, 2, 3), 1, 0), ((2, 2, 3), 0, 2)])
async def test_a_strict_zip_of_different_lengths_is_an_error_behind_all_tuples(
    lengths: tuple[int, ...], ended: int, longer: int
) -> None:
    message = f"^zip: source {ended}, a list of 2, has ended, and source {longer}, a list of 3, has"
    got = []
    with pytest.raises(InputStructureError, match=message):
        async for each in data.zip(*[list(range(each)) for each in lengths], strict=True):
            got.append(each)
    assert got == [(0, 0, 0), (1, 1, 1)]


async def test_a_cancellation_loses_no_part_of_a_tuple() -> None:
    source = Source(1, hangs=True)
    async with data.zip(range(9), prefetch(source.items(), 1), Source(9).items()) as stage:
        assert await anext(stage) == (0, 0, 0)
        assert await cancelled_when_settled(anext, stage)
        state = position(stage)
    again = data.zip(range(9), prefetch(Source(3).items(), 1), Source(9).items())
    again.load_state_dict(state)
    assert await read_all(again) == [(1, 1, 1), (2, 2, 2)]


async def test_chain_gives_one_source_after_the_other_and_opens_all_at_its_beginning() -> None:
    assert await read_all(chain(range(2), [], Source(3).items(), [9])) == [0, 1, 0, 1, 2, 9]
    for make in (chain, lambda *sources: interleave(sources)):
        later = Source(None)
        async with make([1], prefetch(later.items(), 2)):
            await settle()
            assert later.num_read == 2


async def test_mix_depends_on_the_seed_alone_and_keeps_the_ratio_of_weights() -> None:
    def make(seed: int, weights: list[float] | None = None) -> Stage[str]:
        sources = [repeat(["web"]), repeat(["code"]), repeat(["books"])]
        return data.take(mix(sources, weights=weights, seed=seed), 3000)

    got = await read_all(make(3, [4, 1, 1]))
    assert got == await read_all(make(3, [0.4, 0.1, 0.1]))
    assert got != await read_all(make(4, [4, 1, 1]))
    assert Counter(got)["web"] == pytest.approx(2000, rel=0.04)
    assert Counter(await read_all(make(3)))["web"] == pytest.approx(1000, rel=0.08)


async def test_mix_leaves_out_what_has_ended_and_keeps_the_order_of_each_source() -> None:
    got = await read_all(mix([range(20), Source(5).items(), []], seed=1, weights=[1, 9, 1e-12]))
    assert sorted(got) == sorted([*range(20), *range(5)])
    assert got[-10:] == list(range(10, 20))
    both = await read_all(repeat(mix([["a"] * 20, ["b"] * 20], seed=1), 2))
    assert both[:40] != both[40:], "each pass makes other choices"


async def test_many_draws_of_a_mix_go_on_behind_a_restore() -> None:
    def make() -> Stage[int]:
        return mix([range(1200), range(9000, 9400)], seed=8, weights=[3, 1])

    whole = await read_all(make())
    for first in (1023, 1024, 1025):
        assert await read_in_two_lives(make, first) == whole
