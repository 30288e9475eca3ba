"""Several around one stage: the first opens it, the last closes it; open groups in generators."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import FeedHook, InputStateError, MonitoredSession
from asynchooks.data import Stage, batch, interleave, prefetch, repeat, shuffle, take

from ..hooks.inputs import Diary
from ..support.afterwards import nothing_left
from ..support.helpers import settle
from .sources import BadRecordError, Source, read_all

pytestmark = pytest.mark.anyio


WITH_GROUP: dict[str, Any] = {
    "prefetch": lambda items: prefetch(items, 2),
    "prefetch of others": lambda items: prefetch(batch(shuffle(items, 2, 0), 1), 2),
    "prefetch within": lambda items: batch(prefetch(items, 2), 1),
}


@pytest.mark.parametrize("make", WITH_GROUP)
async def test_a_generator_with_an_open_group_may_be_read_to_its_end(make: str) -> None:
    source = Source(5)
    async with nothing_left():
        assert len(await read_all(WITH_GROUP[make](source.items_in_group()))) == 5
    assert source.is_closed


@pytest.mark.parametrize("make", WITH_GROUP)
@pytest.mark.parametrize("way", ["break", "error", "scope", "never read"])
async def test_a_generator_with_an_open_group_is_closed_however_it_is_left(
    way: str, make: str
) -> None:
    source = Source(None)
    async with nothing_left():
        with anyio.CancelScope() as scope:
            try:
                async with WITH_GROUP[make](source.items_in_group()) as items:
                    if way != "never read":
                        await anext(items)
                    await settle()  # its task waits for room
                    if way == "error":
                        raise BadRecordError
                    if way == "scope":
                        scope.cancel()
                        await anyio.sleep_forever()
            except BadRecordError:
                assert way == "error"
    assert source.is_closed


async def test_what_take_leaves_of_a_generator_with_an_open_group_is_closed() -> None:
    source = Source(None)
    assert await read_all(prefetch(take(source.items_in_group(), 2), 3)) == [0, 1]
    assert source.is_closed


async def test_if_one_source_cannot_be_opened_the_others_are_closed() -> None:
    closed = batch([1], 1)
    await closed.aclose()
    source = Source(None)
    async with nothing_left():
        with pytest.raises(RuntimeError, match="is closed; make a new one"):
            async with interleave([prefetch(source.items(), 1), closed]):
                pass


async def test_a_stage_around_an_open_one_ends_with_it() -> None:
    source = Source(None)
    async with nothing_left():
        async with prefetch(source.items(), 1) as items:
            async for _ in batch(items, 2):
                break
        assert source.is_closed


@pytest.mark.parametrize("make", [lambda source: source, lambda source: batch(source, 1)])
async def test_several_may_share_a_stage_and_the_last_one_closes_it(make: Any) -> None:
    source = Source(9)
    shared: Stage[int] = prefetch(source.items(), 2)
    one, two = make(shared), make(shared)
    async with nothing_left():
        async with one:
            async with two:
                got = [await anext(one), await anext(two)]
            assert not source.is_closed
            got += [item async for item in one]
    assert len(got) == 9
    assert source.is_closed


async def test_two_may_share_a_repeated_source() -> None:
    source = Source(3)
    shared = repeat(source.items, 3)
    one, two = prefetch(shared, 1), prefetch(shared, 1)
    async with nothing_left():
        async with one:
            async with two:
                got = [await anext(two) for _ in range(4)]
            got += [item async for item in one]
        assert source.is_closed
    assert set(got) == {0, 1, 2}


async def test_a_stage_that_feeds_two_has_no_position_in_either() -> None:
    shared = prefetch(range(6), 2)
    with pytest.raises(InputStateError, match="feeds 2 stages"):
        interleave([batch(shared, 1), batch(shared, 2)]).state_dict()


OTHERS = "does not know its position: it reads .*, of which items were also taken by others"
INNER: dict[str, Any] = {
    "plain": lambda: batch(range(20), 1),
    "with a task": lambda: prefetch(batch(range(20), 1), 2),
}
AROUND: dict[str, Any] = {
    "plain": lambda inner: batch(inner, 1),
    "with a task": lambda inner: prefetch(inner, 2),
    "far": lambda inner: prefetch(shuffle(take(inner, 9), 1, seed=0), 2),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_stage_around_one_that_others_read_has_no_position(
    when: str, inner: str, around: str
) -> None:
    async with INNER[inner]() as below:
        if when == "before":
            assert await anext(below) == [0]
        async with AROUND[around](below) as rest:
            await anext(rest)
            if when == "meanwhile":
                rest.state_dict()
                await anext(below)
            with pytest.raises(InputStateError, match=OTHERS):
                rest.state_dict()


@pytest.mark.parametrize("inner", INNER)
async def test_a_stage_around_one_that_a_hook_has_read_has_no_position(inner: str) -> None:
    async with INNER[inner]() as below:
        async with MonitoredSession([FeedHook(below, "x")], Diary().creator) as session:
            await session.run([])
        assert below.state_dict()["source"] == {"stage": "sequence", "items": 1}
        async with prefetch(below, 2) as rest:
            await anext(rest)
            with pytest.raises(InputStateError, match=OTHERS):
                rest.state_dict()


async def test_a_stage_around_one_that_is_open_and_was_not_read_has_its_position() -> None:
    state = {"stage": "batch", "items": 3, "source": {"stage": "sequence", "items": 3}}
    async with batch(range(5), 1) as below, prefetch(below, 2) as rest:
        assert [await anext(rest) for _ in range(3)] == [[0], [1], [2]]
        assert rest.state_dict() == state
    async with batch(range(5), 1) as below:
        again = prefetch(below, 2)
        again.load_state_dict(state)
        assert await read_all(again) == [[3], [4]]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("is_read", [True, False])
async def test_no_state_is_loaded_around_a_stage_that_has_begun(inner: str, is_read: bool) -> None:
    async with INNER[inner]() as below:
        if is_read:
            await anext(below)
        rest = prefetch(below, 2)
        state = prefetch(INNER[inner](), 2).state_dict()
        if is_read or inner == "with a task":
            with pytest.raises(RuntimeError, match=r"which prefetch\(.* reads, has begun"):
                rest.load_state_dict(state)
        else:
            rest.load_state_dict(state)
