"""batch, shard and take; which item does not fit into a batch."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from asynchooks import InputStructureError
from asynchooks.data import batch, prefetch, shard, take

from .sources import BadRecordError, Source, position, read_all


async def test_batches_are_full_but_the_last() -> None:
    assert await read_all(batch(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert await read_all(batch(range(5), 2, drop_remainder=True)) == [[0, 1], [2, 3]]
    assert await read_all(batch(range(4), 2, True)) == [[0, 1], [2, 3]]
    assert await read_all(batch([], 2)) == []
    assert await read_all(batch(range(5), 3, collate=sum)) == [3, 7]


@pytest.mark.parametrize("make", [range, lambda num: Source(num).items()])
@pytest.mark.parametrize("num", [1, 3, 30])
async def test_shards_are_disjoint_and_together_the_whole(make: Any, num: int) -> None:
    parts = [await read_all(shard(make(20), num, index)) for index in range(num)]
    assert parts == [list(range(index, 20, num)) for index in range(num)]


async def test_take_reads_no_more() -> None:
    for count in (0, 3, 9):
        source = Source(5)
        assert await read_all(take(source.items(), count)) == list(range(min(count, 5)))
        assert source.num_read == min(count, 5)


class Pair(NamedTuple):
    image: Any
    label: Any


async def _batch(*items: Any) -> Any:
    [made] = await read_all(batch(list(items), len(items)))
    return made


async def test_arrays_are_stacked_within_tuples_and_mappings() -> None:
    array = np.arange(3, dtype=np.int16)
    made = await _batch(
        {"x": (array, 1), "y": Pair(array, "a")}, {"x": (-array, 2), "y": Pair(array, "b")}
    )
    arrays, numbers = made["x"]
    assert (arrays.tolist(), arrays.dtype) == ([[0, 1, 2], [0, -1, -2]], np.int16)
    assert list(numbers) == [1, 2]
    assert type(made["y"]) is Pair
    assert (made["y"].image.shape, made["y"].label) == ((2, 3), ["a", "b"])
    numbers = await _batch(np.float32(1), np.float32(2))
    assert (numbers.dtype, numbers.shape) == (np.float32, (2,))


@pytest.mark.parametrize("items", [["a", "b"], [[1], [2]], [None, 3], [True, False], [1.5, 2.5]])
async def test_all_else_becomes_a_list(items: list[Any]) -> None:
    assert await _batch(*items) == items


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        (np.zeros(3), np.zeros(4), r"has the shape \(4,\), and item 2 the shape \(3,\); pad"),
        (np.zeros(3), None, r"is None, and item 2 is array"),
        ({"a": 1}, {"b": 1}, r"is a mapping with the keys \['b'\], and item 2 is a mapping"),
        ((2, 3), 1, r"is 1, and item 2 is a tuple of 2"),
        ("a", np.zeros(2), r"is array\(.*, and item 2 is 'a'"),
        (np.ones(2), np.array(["a", "b"]), r"is of <U1, and item 2 of float64; give items"),
        (({"a": np.zeros(1)},), ({"a": np.zeros(2)},), r"\[0\]\['a'\] has the shape \(2,\)"),
    ],
)
async def test_an_item_that_does_not_fit_is_named_as_counted_from_the_first_run(
    good: Any, bad: Any, message: str
) -> None:
    async with take(batch([good, good, good, bad], 2), 9) as batches:
        await anext(batches)
        state = position(batches)
    again = take(batch([good, good, good, bad], 2), 9)
    again.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(InputStructureError, match=f"item 3 ?{message}"):
            await anext(again)


def failing(items: list[Any]) -> Any:
    if 4 in items:
        raise BadRecordError
    return items


async def test_an_error_of_collate_names_the_batch_as_counted_from_the_first_run() -> None:
    first, again = (prefetch(batch(range(9), 2, collate=failing), 1) for _ in "12")
    async with first:
        await anext(first)
        again.load_state_dict(position(first))
    with pytest.raises(BadRecordError) as caught:
        await read_all(again)
    assert caught.value.__notes__ == ["in batch, after 4 items"]
