"""unbatch: the inverse of what batch does by default."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from asynchooks import FeedHook, InputStructureError
from asynchooks.data import batch, prefetch, repeat, unbatch

from ..hooks.training import run_session
from .sources import read_all, read_some


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "make",
    [
        lambda place: (place, str(place)),
        lambda place: {"x": place, "y": (np.full(2, place), b"abc")},
        lambda place: Point(np.float32(place), [place]),
        lambda place: np.arange(place, place + 3),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 20])
async def test_it_gives_what_was_batched(make: Callable[[int], Any], size: int) -> None:
    items = [make(place) for place in range(7)]
    got = await read_all(prefetch(unbatch(batch(items, size)), 4))
    assert [type(each) for each in got] == [type(each) for each in items]
    np.testing.assert_equal(got, items)


async def test_a_batch_without_items_gives_none() -> None:
    assert await read_all(unbatch([[], [1], np.zeros(0), ([], []), {"x": []}, [2]])) == [1, 2]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (7, "^unbatch: a batch is 7; give lists or arrays, or tuples or mappings"),
        ("text", "a batch is 'text'; give lists"),
        (np.float32(1), r"a batch is .*1\.0.*; give lists"),
        ((), r"a batch is \(\); give lists"),
        ({"x": [1], "y": (2, 3)}, r"a batch\['y'\]\[0\] is 2; give lists"),
        (([1], [2, 3]), r"the parts of a batch are of different lengths, \{0: 1, 1: 2\}; give"),
    ],
)
async def test_what_is_no_batch_is_an_error(made: Any, message: str) -> None:
    stage = unbatch([[1, 2], made])
    assert await read_some(stage, 2) == [1, 2]
    with pytest.raises(InputStructureError, match=message):
        await anext(stage)


async def test_items_belong_to_the_pass_of_their_batch() -> None:
    seen: list[int] = []
    source = unbatch(repeat(batch(range(5), 3), 2))
    hook = FeedHook(source, "x", after_epoch=lambda session, epoch: seen.append(-1 - epoch))

    def step(x: int) -> dict[str, Any]:
        seen.append(x)
        return {}

    await run_session([hook], step)
    assert seen == [*range(5), -1, *range(5), -2]
