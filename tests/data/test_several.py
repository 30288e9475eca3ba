"""zip, chain and mix: several sources in one pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedHook,
    InputStateError,
    InputStructureError,
    MonitoredSession,
    SharedSessionCreator,
    data,
)
from asynchooks.data import Stage, batch, chain, interleave, mix, prefetch, repeat, shuffle

from ..support.helpers import settle
from .sources import (
    Source,
    StatefulSync,
    position,
    read_all,
    read_in_lives,
    read_in_two_lives,
    read_some,
)

pytestmark = pytest.mark.anyio

untyped: Any = data


async def test_zip_ends_with_the_shortest() -> None:
    assert await read_all(data.zip(range(3), ["abcd"], [7, 8])) == [(0, "abcd", 7)]
    assert await read_all(data.zip(range(3), Source(2).items())) == [(0, 0), (1, 1)]
    assert await read_all(data.zip([], range(3))) == []


@pytest.mark.parametrize(("lengths", "ended", "longer"), [((3, 2, 3), 1, 0), ((2, 2, 3), 0, 2)])
async def test_a_strict_zip_of_different_lengths_is_an_error_behind_all_tuples(
    lengths: tuple[int, ...], ended: int, longer: int
) -> None:
    stage = data.zip(*[list(range(each)) for each in lengths], strict=True)
    got = []
    message = f"^zip: source {ended}, a list of 2, has ended, and source {longer}, a list of 3, has"
    with pytest.raises(InputStructureError, match=message):
        async for each in stage:
            got.append(each)
    assert got == [(0, 0, 0), (1, 1, 1)]
    whole = data.zip([1, 2], Source(2).items(), strict=True)
    assert await read_all(whole) == [(1, 0), (2, 1)]


async def test_a_cancellation_loses_no_part_of_a_tuple() -> None:
    async with data.zip(range(9), prefetch(Source(1, hangs=True).items(), 1)) as stage:
        assert await anext(stage) == (0, 0)
        with anyio.move_on_after(0.01):
            await anext(stage)
        state = position(stage)
    again = data.zip(range(9), prefetch(Source(3).items(), 1))
    again.load_state_dict(state)
    assert await read_all(again) == [(1, 1), (2, 2)]

    send, receive = anyio.create_memory_object_stream[int](4)
    async with send, receive:
        async with data.zip(range(9), prefetch(receive, 1)) as stage:
            with anyio.move_on_after(0.01):
                await anext(stage)
            await send.send(5)
            assert await anext(stage) == (0, 5)


async def test_chain_gives_one_source_after_the_other() -> None:
    assert await read_all(chain(range(2), [], Source(3).items(), [9])) == [0, 1, 0, 1, 2, 9]
    later = Source(None)
    async with chain([1], prefetch(later.items(), 2)) as stage:
        await settle()
        assert later.num_read == 2
        assert await read_some(stage, 2) == [1, 0]


async def test_mix_depends_on_the_seed_alone_and_keeps_the_ratio_of_weights() -> None:
    def make(seed: int, weights: list[float] | None = None) -> Stage[str]:
        sources = [repeat(["web"]), repeat(["code"]), repeat(["books"])]
        return data.take(mix(sources, weights=weights, seed=seed), 6000)

    got = await read_all(make(3, [4, 1, 1]))
    assert got == await read_all(make(3, [0.4, 0.1, 0.1]))
    assert got != await read_all(make(4, [4, 1, 1]))
    counts = Counter(got)
    assert abs(counts["web"] / 6000 - 4 / 6) < 0.03
    assert abs(counts["code"] / 6000 - 1 / 6) < 0.03
    alike = Counter(await read_all(make(3)))
    assert all(abs(num / 6000 - 1 / 3) < 0.03 for num in alike.values())


async def test_mix_leaves_out_what_has_ended_and_keeps_the_order_of_each_source() -> None:
    got = await read_all(mix([range(20), Source(5).items(), []], seed=1, weights=[1, 9, 1e-12]))
    assert sorted(got) == sorted([*range(20), *range(5)])
    assert got[-10:] == list(range(10, 20))


async def test_each_pass_makes_other_choices() -> None:
    got = await read_all(repeat(mix([["a"] * 20, ["b"] * 20], seed=1), 2))
    assert got[:40] != got[40:]
    assert Counter(got[:40]) == Counter(got[40:])


PIPELINES: dict[str, Callable[[], Stage[Any]]] = {
    "zip": lambda: data.zip(range(9), Source(7).items()),
    "zip of prefetches": lambda: data.zip(prefetch(StatefulSync(8), 3), prefetch(range(9), 2)),
    "strict": lambda: data.zip(range(5), iter(range(5)), strict=True),
    "chain": lambda: chain(range(3), Source(4).items(), [], StatefulSync(3)),
    "mix": lambda: mix([range(9), Source(3).items(), iter(range(4))], seed=5, weights=[1, 5, 2]),
    "mix that is repeated": lambda: repeat(mix([range(4), range(10, 13)], seed=2), 3),
    "chain that is repeated": lambda: repeat(chain(range(2), range(3)), 3),
    "zip that is repeated": lambda: repeat(data.zip(range(2), range(3)), 3),
    "all, prefetched": lambda: prefetch(
        batch(chain(mix([range(5), range(4)], seed=1), interleave([range(3), range(2)])), 2), 3
    ),
    "shuffled": lambda: shuffle(chain(range(5), data.zip(range(3), range(3))), 4, 1),
}


@pytest.mark.parametrize("name", PIPELINES)
async def test_a_pipeline_goes_on_behind_any_item(name: str) -> None:
    make = PIPELINES[name]
    whole = await read_all(make())
    assert len(whole) > 4
    for first in range(len(whole) + 1):
        assert await read_in_two_lives(make, first) == whole
        assert await read_in_lives((make(), first), (make(), 1), (make(), 99)) == whole


async def test_many_draws_of_a_mix_go_on_behind_a_restore() -> None:
    def make() -> Stage[int]:
        return mix([range(2000), range(9000, 9900)], seed=8, weights=[3, 1])

    whole = await read_all(make())
    for first in (1023, 1024, 1025, 2900):
        assert await read_in_two_lives(make, first) == whole


async def test_workers_with_feed_hooks_share_them() -> None:
    seen: list[Any] = []

    async def step(x: Any) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        seen.append(x)
        return {}

    source = chain(data.zip(range(9), range(9)), mix([range(5), range(10, 15)], seed=1))
    creator = SharedSessionCreator(step, num_workers=3)

    async def worker() -> None:
        async with MonitoredSession([FeedHook(source, "x")], creator) as session:
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(worker)
    expected = [(each, each) for each in range(9)] + list(range(5)) + list(range(10, 15))
    assert Counter(seen) == Counter(expected)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (untyped.zip, ValueError, "^zip got no sources; give at least one"),
        (chain, ValueError, "^chain got no sources"),
        (lambda: untyped.mix([], seed=1), ValueError, "^mix got no sources"),
        (
            lambda: untyped.mix(3, seed=1),
            TypeError,
            r"^mix got 3; give several sources: mix\(\[a, b\]",
        ),
        (lambda: untyped.zip([1], 3), TypeError, "^source is 3; give a stage"),
        (lambda: untyped.zip([1], strict=1), TypeError, "^strict is 1; give True or False"),
        (lambda: untyped.mix([[1]], seed=0.5), TypeError, "^seed is 0.5; give an integer"),
        (
            lambda: untyped.mix([[1]], seed=1, weights=[1, 2]),
            ValueError,
            "there are 1 sources; give one",
        ),
        (
            lambda: untyped.mix([[1]], seed=1, weights=2),
            TypeError,
            "^weights is 2; give a list of numbers > 0",
        ),
        (
            lambda: untyped.mix([[1]], seed=1, weights=[0]),
            ValueError,
            r"^weights\[0\] is 0; give a finite",
        ),
        (
            lambda: untyped.mix([[1]], seed=1, weights=["a"]),
            TypeError,
            r"^weights\[0\] is 'a'; give a",
        ),
    ],
)
def test_wrong_arguments_are_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


async def test_a_state_of_other_sources_is_an_error() -> None:
    makes: list[Callable[[int], Stage[int]]] = [
        lambda num: mix([[1]] * num, seed=1),
        lambda num: chain(*[[1]] * num),
    ]
    for make in makes:
        with pytest.raises(InputStateError, match="that of 2 sources, and there are 3"):
            make(3).load_state_dict(make(2).state_dict())


async def test_they_have_no_end_of_an_epoch() -> None:
    for source in (mix([repeat([1])], seed=1), chain(repeat([1])), data.zip(repeat([1]), range(9))):
        hook = FeedHook(source, "x", after_epoch=print)
        with pytest.raises(InputStateError, match="mixes items of several passes"):
            async with MonitoredSession([hook], _step) as session:
                await session.run([])


def _step(x: Any) -> dict[str, Any]:
    return {}
