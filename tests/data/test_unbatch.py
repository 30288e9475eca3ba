"""unbatch: the inverse of what batch does by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

from asynchooks import FeedHook, InputStateError, InputStructureError, MonitoredSession
from asynchooks.data import Stage, batch, prefetch, repeat, shuffle, unbatch

from .sources import (
    Source,
    StatefulSync,
    read_all,
    read_in_lives,
    read_in_two_lives,
    read_some,
)

pytestmark = pytest.mark.anyio


class Point(NamedTuple):
    x: Any
    y: Any


ITEMS: list[Callable[[int], Any]] = [
    lambda place: place,
    lambda place: (place, str(place)),
    lambda place: {"x": place, "y": (np.full(2, place), b"abc")},
    lambda place: Point(np.float32(place), [place]),
    lambda place: np.arange(place, place + 3),
]


@pytest.mark.parametrize("make", ITEMS)
@pytest.mark.parametrize("size", [1, 3, 7, 20])
async def test_it_gives_what_was_batched(make: Callable[[int], Any], size: int) -> None:
    items = [make(place) for place in range(7)]
    for stage in (unbatch(batch(items, size)), prefetch(unbatch(batch(items, size)), 4)):
        got = await read_all(stage)
        assert [type(each) for each in got] == [type(each) for each in items]
        np.testing.assert_equal(got, items)


async def test_a_batch_without_items_gives_none() -> None:
    assert await read_all(unbatch([[], [1], np.zeros(0), ([], []), {"x": []}, [2]])) == [1, 2]
    assert await read_all(unbatch([])) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (7, "^unbatch: a batch is 7; give lists or arrays, or tuples or mappings"),
        ("text", "a batch is 'text'; give lists"),
        (np.float32(1), r"a batch is .*1\.0.*; give lists"),
        ((), r"a batch is \(\); give lists"),
        ({}, "a batch is {}; give lists"),
        ({"x": [1], "y": (2, 3)}, r"a batch\['y'\]\[0\] is 2; give lists"),
        (([1], [2, 3]), r"the parts of a batch are of different lengths, \{0: 1, 1: 2\}; give"),
        ({"x": np.zeros(2), "y": []}, r"of different lengths, \{'x': 2, 'y': 0\}; give parts"),
    ],
)
async def test_what_is_no_batch_is_an_error(made: Any, message: str) -> None:
    stage = unbatch([[1, 2], made])
    assert await read_some(stage, 2) == [1, 2]
    with pytest.raises(InputStructureError, match=message):
        await anext(stage)


PIPELINES: dict[str, Callable[[], Stage[Any]]] = {
    "of batches": lambda: unbatch(batch(range(8), 3)),
    "of a source with its own position": lambda: unbatch(batch(StatefulSync(8), 3)),
    "of a generator, prefetched": lambda: prefetch(unbatch(batch(Source(8).items(), 3)), 2),
    "repeated": lambda: repeat(unbatch(batch(range(5), 3)), 3),
    "of passes, shuffled": lambda: shuffle(unbatch(batch(repeat(range(5), 2), 3)), 4, 1),
    "batched again": lambda: batch(unbatch(batch(range(20), 3)), 4),
}


@pytest.mark.parametrize("name", PIPELINES)
async def test_its_position_may_lie_inside_a_batch(name: str) -> None:
    make = PIPELINES[name]
    whole = await read_all(make())
    for first in range(len(whole) + 1):
        assert await read_in_two_lives(make, first) == whole
        assert await read_in_lives((make(), first), (make(), 1), (make(), 99)) == whole


async def test_a_position_in_a_batch_of_another_size_is_an_error() -> None:
    stage = unbatch(batch(range(8), 4))
    assert await read_some(stage, 3) == [0, 1, 2]
    again = unbatch(batch(range(8), 2))
    again.load_state_dict(stage.state_dict())
    with pytest.raises(InputStateError, match="behind item 3 of a batch, which has 2; give the"):
        await anext(again)


async def test_items_belong_to_the_pass_of_their_batch() -> None:
    ended: list[tuple[int, int]] = []
    seen: list[int] = []

    def step(x: int) -> dict[str, Any]:
        seen.append(x)
        return {}

    def end_epoch(session: Any, epoch: int) -> None:
        ended.append((epoch, len(seen)))

    source = unbatch(repeat(batch(range(5), 3), 2))
    hooks = [FeedHook(source, "x", after_epoch=end_epoch)]
    async with MonitoredSession(hooks, step) as session:
        while not session.should_stop():
            await session.run([])
    assert (seen, ended) == ([*range(5)] * 2, [(0, 5), (1, 10)])


async def test_a_cancellation_loses_no_batch() -> None:
    send, receive = anyio.create_memory_object_stream[list[int]](4)
    async with send, receive:
        async with unbatch(prefetch(receive, 1)) as stage:
            with anyio.move_on_after(0.01):
                await anext(stage)
            await send.send([5, 6])
            assert await read_some(stage, 2) == [5, 6]


def test_what_cannot_be_read_is_an_error() -> None:
    with pytest.raises(TypeError, match="^source is 3; give a stage"):
        unbatch(3)  # type: ignore[arg-type]
