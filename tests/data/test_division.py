"""What a divided source has left is divided again: each item is used once in each pass."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any
from zlib import crc32

import pytest

from asynchooks import InputError, InputStateError, data
from asynchooks.data import (
    Rollout,
    RolloutStage,
    Stage,
    batch,
    map_concurrent,
    prefetch,
    repeat,
    rollouts,
    shard,
    shuffle,
)

# private: by the checkpoints of several processes, the thousands of lives below would take hours
from asynchooks.data._division import divided_again

from ..support.helpers import turns

NUM_ITEMS = 23
NUM_PASSES = 3


def passes(epoch: int) -> list[tuple[int, int]]:
    """What `repeat` around it reads in this pass."""
    return [(epoch, number) for number in range(NUM_ITEMS)]


def stream() -> Stage[Any]:
    return repeat(passes, NUM_PASSES)


async def same(item: Any) -> Any:
    """After some time, so that items overtake one another."""
    await turns(crc32(repr(item).encode()) % 5)
    return item


def generated(source: Stage[Any]) -> Stage[Any]:
    return rollouts(same, source, 2, concurrency=7, max_staleness=9)


def is_kept(item: tuple[int, int]) -> bool:
    return item[1] not in (1, 2, 5, 11, 12, 20)  # some are left of each shard


def in_passes(*part: int) -> Stage[Any]:
    return repeat(shard(passes, *part), NUM_PASSES)


PIPELINES: dict[str, Callable[[int, int], Stage[Any]]] = {
    "of one pass": lambda *part: shard(lambda: passes(0), *part),
    "in passes": in_passes,
    "of a stream of passes": lambda *part: shard(stream(), *part),
    "batches in passes": lambda *part: prefetch(
        repeat(batch(shard(passes, *part), 3), NUM_PASSES), 2
    ),
    "batches over passes": lambda *part: batch(in_passes(*part), 4),
    "shuffled below": lambda *part: repeat(shard(shuffle(passes, 5, 1), *part), NUM_PASSES),
    "shuffled above": lambda *part: repeat(
        batch(shuffle(shard(passes, *part), 5, 1), 2), NUM_PASSES
    ),
    "shuffled over passes": lambda *part: shuffle(in_passes(*part), 5, 1),
    "shuffled twice": lambda *part: shuffle(
        batch(shuffle(shard(shuffle(stream(), 4, 1), *part), 4, 2), 2), 3, 1
    ),
    "mapped": lambda *part: prefetch(data.map(map_concurrent(same, in_passes(*part), 3), same), 2),
    "filtered": lambda *part: batch(
        repeat(data.filter(shard(passes, *part), is_kept), NUM_PASSES), 2
    ),
    "passes of passes": lambda *part: repeat(
        batch(repeat(shuffle(shard(lambda: range(NUM_ITEMS), *part), 3, 1), 2), 2), 2
    ),
    "generated": lambda *part: generated(in_passes(*part)),
    "generated, of batches": lambda *part: generated(
        repeat(batch(shard(passes, *part), 2), NUM_PASSES)
    ),
    "generated, of batches over passes": lambda *part: generated(batch(shard(stream(), *part), 2)),
    "generated, shuffled": lambda *part: generated(
        prefetch(repeat(shuffle(shard(passes, *part), 4, 1), NUM_PASSES), 2)
    ),
    "generated, of shuffled batches": lambda *part: generated(
        shuffle(repeat(batch(shuffle(shard(passes, *part), 4, 1), 2), NUM_PASSES), 3, 1)
    ),
}


def expected(name: str) -> Counter[Any]:
    """How often each item is to be used."""
    if name == "passes of passes":
        return Counter(dict.fromkeys(range(NUM_ITEMS), 4))
    items = passes(0) if name == "of one pass" else [each for it in range(3) for each in passes(it)]
    return Counter(each for each in items if name != "filtered" or is_kept(each))


def leaves(item: Any) -> Iterator[Any]:
    """The items of the source in what has left a pipeline."""
    if isinstance(item, Rollout):
        item = item.item
    if isinstance(item, list):
        for each in item:
            yield from leaves(each)
    elif isinstance(item, tuple) and isinstance(item[0], list):  # collated: (epochs, numbers)
        yield from zip(*item, strict=True)
    else:
        yield item


async def live(make: Any, states: list[Any], num: int, chance: random.Random | None) -> Any:
    """What all shards read, as far as chance lets them, and their states then.

    Those of another number of shards left the states.
    """
    used, left = Counter[Any](), []
    for index in range(num):
        stage = make(num, index)
        if states:
            stage.load_state_dict(divided_again(states, stage.state_dict(), num))
        limit = 10**6 if chance is None else chance.randrange(2 + 2 * NUM_ITEMS // num)
        async with stage:
            while limit > 0 and (item := await anext(stage, None)) is not None:
                limit -= 1
                used.update(leaves(item))
            left.append(json.loads(json.dumps(stage.state_dict())))
    return used, left


async def check(name: str, nums: list[int], chance: random.Random) -> None:
    used, states = Counter[Any](), list[Any]()
    for num in nums:
        now, states = await live(PIPELINES[name], states, num, chance)
        used += now
    used += (await live(PIPELINES[name], states, nums[0] % 8 + 1, None))[0]
    assert used == expected(name), (name, nums)


@pytest.mark.parametrize("name", PIPELINES)
async def test_each_item_is_used_once_over_other_numbers_of_shards(name: str) -> None:
    chance = random.Random(name)
    for _ in range(4):
        await check(name, [chance.randint(1, 8) for _ in range(chance.randint(1, 4))], chance)


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", range(1, 9))
async def test_each_item_is_used_once_over_all_numbers_of_shards(before: int) -> None:
    for after in range(1, 9):
        for point, name in zip(range(20), cycle(PIPELINES), strict=False):
            await check(name, [before, after], random.Random(f"{before} {after} {point}"))


async def test_what_rollouts_did_not_give_out_is_counted_once_over_all_shards() -> None:
    def make(num: int, index: int) -> RolloutStage:
        source = shard(range(60), num, index)
        options: Any = {"concurrency": 2, "max_staleness": 9, "accept": lambda item: item % 3 > 0}
        return rollouts(same, source, 1, **options)

    num_used, states = 0, list[Any]()
    for num, limit in ((2, 9), (3, 3), (2, 60)):
        left, num_refused = list[Any](), 0
        for index in range(num):
            stage = make(num, index)
            if states:
                stage.load_state_dict(divided_again(states, stage.state_dict(), num))
            async with stage:
                for _ in range(limit):
                    num_used += await anext(stage, None) is not None
                left.append(stage.state_dict())
                num_refused += stage.statistics().num_refused
        states = left
    assert (num_used, num_refused) == (40, 20)


async def test_how_a_source_was_divided_is_forgotten_where_all_that_was_used_is_passed() -> None:
    states, sizes = list[Any](), list[int]()
    for num in (1, 2, 3) * 5:
        stages = [shard(range(999), num, index) for index in range(num)]
        for index, stage in enumerate(stages):
            if states:
                stage.load_state_dict(divided_again(states, stage.state_dict(), num))
            for _ in range(9 - index):
                await anext(stage)
        states = [stage.state_dict() for stage in stages]
        sizes.append(max(len(json.dumps(state)) for state in states))
    assert max(sizes[3:]) < 2 * max(sizes[:3])


@pytest.mark.parametrize("num_passes", [None, 9])
async def test_a_source_that_gives_nothing_any_more_is_no_pass_that_others_have_used(
    num_passes: int | None,
) -> None:
    def make(num: int, index: int) -> Stage[Any]:
        return repeat(shard(lambda epoch: range(6 if epoch < 3 else 0), num, index), num_passes)

    behind, ahead = make(2, 0), make(2, 1)
    assert [await anext(ahead) for _ in range(7)] == [1, 3, 5, 1, 3, 5, 1]
    stage, items = make(1, 0), list[int]()
    states = [behind.state_dict(), ahead.state_dict()]
    stage.load_state_dict(divided_again(states, stage.state_dict(), 1))
    with pytest.raises(InputError, match="gave items, and none in pass 4"):
        while True:
            items.append(await anext(stage))
    assert items == [0, 2, 4, 0, 2, 4, 0, 2, 3, 4, 5]


async def test_a_shuffle_below_a_shard_has_the_seed_that_it_had() -> None:
    states = [shard(shuffle(range(9), 4, seed=1), 2, index).state_dict() for index in range(2)]
    other = shard(shuffle(range(9), 4, seed=2), 1, 0)
    with pytest.raises(InputStateError, match="the state is that of seed 1, and this is 2"):
        other.load_state_dict(divided_again(states, other.state_dict(), 1))


REFUSED: dict[str, tuple[Callable[[int, int], Stage[Any]], str]] = {
    "no shard": (lambda num, index: batch(range(index, 9, num), 2), "it is not divided by asyn"),
    "take": (lambda *part: data.take(shard(range(9), *part), 2), "below take, unbatch"),
    "unbatch": (lambda *part: data.unbatch(shard([[1, 2]] * 9, *part)), "below take, unbatch"),
    "several": (lambda *part: data.chain(shard(range(9), *part)), "below take, unbatch"),
    "shards twice": (
        lambda num, index: shard(range(9), num, 0),
        r"are \[\[0, 2\], \[0, 2\]\], each .*; expected each of 2 once",
    ),
    "another number": (
        lambda num, index: shard(range(9), 4, index) if num == 3 else shard(range(9), 2, index),
        r"3 are to read it, and it is divided by shard\(source, num_shards=4, index=1\); give "
        "num_shards=3",
    ),
    "passes": (
        lambda num, index: repeat(shard(range(9), num, index)) if num == 2 else shard([1], 3, 1),
        "1 repeat stages were around the shard, and there are 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_left_is_not_divided_where_that_would_lose_or_repeat_items(name: str) -> None:
    make, why = REFUSED[name]
    _, states = await live(make, [], 2, random.Random(1))
    with pytest.raises(InputStateError, match=why):
        divided_again(states, make(3, 1).state_dict(), 3)
