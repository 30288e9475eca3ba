"""How batches are made of items, and which item does not fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from asynchooks import InputStructureError
from asynchooks.data import batch, take

from .sources import position, read_all, read_some

pytestmark = pytest.mark.anyio


class Pair(NamedTuple):
    image: Any
    label: Any


async def _batch(*items: Any) -> Any:
    [made] = await read_all(batch(list(items), len(items)))
    return made


async def test_arrays_are_stacked_within_tuples_and_mappings() -> None:
    array = np.arange(3, dtype=np.int16)
    made = await _batch(
        {"x": (array, 1), "y": Pair(array, "a")},
        {"x": (-array, 2), "y": Pair(array, "b")},
    )  # fmt: skip
    assert list(made) == ["x", "y"]
    arrays, numbers = made["x"]
    assert np.array_equal(arrays, [[0, 1, 2], [0, -1, -2]])
    assert arrays.dtype == np.int16
    assert list(numbers) == [1, 2]
    assert type(made["y"]) is Pair
    assert made["y"].image.shape == (2, 3)
    assert made["y"].label == ["a", "b"]


@pytest.mark.parametrize(
    "items",
    [["a", "b"], [b"a", b"b"], [[1], [2]], [None, 3], [True, False], [1, 2], [1.5, 2.5]],
)
async def test_all_else_becomes_a_list(items: list[Any]) -> None:
    assert await _batch(*items) == items


async def test_numbers_of_numpy_become_an_array() -> None:
    made = await _batch(np.float32(1), np.float32(2))
    assert made.dtype == np.float32
    assert made.shape == (2,)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        (
            np.zeros(3),
            np.zeros(4),
            r"item 3 has the shape \(4,\), and item 2 the shape \(3,\); pad",
        ),
        (np.zeros(3), None, r"item 3 is None, and item 2 is array"),
        ({"a": 1}, {"b": 1}, r"item 3 is a mapping with the keys \['b'\], and item 2 is a mapping"),
        ({"a": 1}, 4, r"item 3 is 4, and item 2 is a mapping with the keys \['a'\]; give items"),
        ((1, 2), (1, 2, 3), r"item 3 is a tuple of 3, and item 2 is a tuple of 2"),
        ((1, 2), [1, 2], r"item 3 is \[1, 2\], and item 2 is a tuple of 2"),
        (({"a": np.zeros(1)},), ({"a": np.zeros(2)},), r"item 3\[0\]\['a'\] has the shape \(2,\)"),
    ],
)
async def test_an_item_that_does_not_fit_is_named(good: Any, bad: Any, message: str) -> None:
    async with batch([good, good, good, bad], 2) as batches:
        await anext(batches)
        for _ in range(2):
            with pytest.raises(InputStructureError, match=message):
                await anext(batches)


async def test_no_array_is_made_of_numbers_and_words() -> None:
    with pytest.raises(InputStructureError, match="item 1"):
        await _batch(np.float32(1), "one")


async def test_an_item_that_does_not_fit_is_named_as_counted_from_the_first_run() -> None:
    items = [(1,), (1,), (1,), (1, 2)]
    async with take(batch(items, 2), 9) as stage:
        await read_some(stage, 1)
        state = position(stage)
    again = take(batch(items, 2), 9)
    again.load_state_dict(state)
    with pytest.raises(InputStructureError, match="item 3 is a tuple of 2"):
        await read_all(again)
