"""batch, shard, take and interleave; which item does not fit into a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from asynchooks import InputStructureError
from asynchooks.data import Stage, batch, interleave, prefetch, shard, shuffle, take

from ..support.helpers import settle
from .sources import (
    BadRecordError,
    Source,
    position,
    read_all,
    read_in_two_lives,
    read_some,
)

pytestmark = pytest.mark.anyio


async def test_batches_are_full_but_the_last() -> None:
    assert await read_all(batch(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert await read_all(batch(range(5), 2, drop_remainder=True)) == [[0, 1], [2, 3]]
    assert await read_all(batch(range(4), 2, True)) == [[0, 1], [2, 3]]
    assert await read_all(batch([], 2)) == []
    assert await read_all(batch(range(5), 3, collate=sum)) == [3, 7]


async def test_shards_are_disjoint_and_together_the_whole() -> None:
    for num in (1, 2, 3, 7, 30):
        parts = [await read_all(shard(range(20), num, index)) for index in range(num)]
        assert parts == [list(range(index, 20, num)) for index in range(num)]
        again = [await read_all(shard(Source(20).items(), num, index)) for index in range(num)]
        assert again == parts


async def test_take_reads_no_more() -> None:
    for count in (0, 3, 9):
        source = Source(5)
        assert await read_all(take(source.items(), count)) == list(range(min(count, 5)))
        assert source.num_read == min(count, 5)


async def test_interleave_takes_turns_and_leaves_out_what_has_ended() -> None:
    stage = interleave([range(1), Source(4).items(), range(10, 12), []])
    assert await read_all(stage) == [0, 0, 10, 1, 11, 2, 3]


async def test_prefetches_below_an_interleave_work_at_once() -> None:
    one, two = Source(None), Source(None)
    async with interleave([prefetch(one.items(), 2), prefetch(two.items(), 2)]):
        await settle()
        assert one.num_read == two.num_read == 2


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "is 0; give an integer >= 1"),
        (-3, ValueError, "is -3; give an integer >= 1"),
        (True, TypeError, "is True; give an integer >= 1"),
        (2.0, TypeError, r"is 2\.0; give an integer >= 1"),
        ("2", TypeError, "is '2'; give an integer >= 1"),
        (None, TypeError, "is None; give an integer >= 1"),
    ],
)
def test_a_size_is_a_whole_number(value: Any, error: type[Exception], message: str) -> None:
    for name, make in (("batch_size", batch), ("buffer_size", prefetch)):
        with pytest.raises(error, match=f"^{name} {message}"):
            make([1], value)
    with pytest.raises(error, match=f"^num_shards {message}"):
        shard([1], value, 0)


def test_other_bad_arguments_say_what_to_give() -> None:
    with pytest.raises(ValueError, match="index is 2 of 2 shards; give 0 to 1"):
        shard([1], 2, 2)
    with pytest.raises(ValueError, match="index is -1; give an integer >= 0"):
        shard([1], 2, -1)
    with pytest.raises(ValueError, match="count is -1; give an integer >= 0"):
        take([1], -1)
    with pytest.raises(ValueError, match="interleave got no sources; give at least one"):
        interleave([])
    with pytest.raises(TypeError, match="collate is 3; give a function that takes a list"):
        batch([1], 1, collate=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="source is 'a'; give a stage"):
        interleave("ab")
    three: Any = 3
    with pytest.raises(TypeError, match=r"interleave got 3; .*interleave\(\[a, b\]\)"):
        interleave(three)
    with pytest.raises(TypeError, match="drop_remainder is 3; give True or False"):
        batch([1], 1, three)

    async def collate(items: list[int]) -> list[int]:
        return items

    with pytest.raises(TypeError, match="is async; call it through map_concurrent"):
        batch([1], 1, collate=collate)


@pytest.mark.parametrize("count", range(8))
async def test_the_turn_of_an_interleave_is_saved_as_it_was_at_the_consumer(count: int) -> None:
    def make(size: int) -> Stage[int]:
        return prefetch(interleave([range(1), range(10, 14), range(20, 22)]), size)

    whole = await read_in_two_lives(lambda: make(4), count, lambda: make(1))
    assert whole == [0, 10, 20, 11, 21, 12, 13]


async def test_a_position_behind_a_last_batch_that_was_not_full_is_the_end() -> None:
    def make() -> Stage[Any]:
        return take(batch(shuffle(range(5), 3, 0), 2), 9)

    assert len(await read_in_two_lives(make, 9)) == 3


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
    "items", [["a", "b"], [b"a", b"b"], [[1], [2]], [None, 3], [True, False], [1, 2], [1.5, 2.5]]
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
        ([1, 2], (1, 2), r"item 3 is a tuple of 2, and item 2 is \[1, 2\]"),
        (1, (2, 3), r"item 3 is a tuple of 2, and item 2 is 1"),
        ((2, 3), 1, r"item 3 is 1, and item 2 is a tuple of 2"),
        (None, {"a": 1}, r"item 3 is a mapping with the keys \['a'\], and item 2 is None"),
        ("a", np.zeros(2), r"item 3 is array\(.*, and item 2 is 'a'"),
        (np.zeros(2), "a", r"item 3 is 'a', and item 2 is array"),
        (np.float32(1), "one", r"item 3 is 'one', and item 2 is "),
        (np.ones(2), np.array(["a", "b"]), r"item 3 is of <U1, and item 2 of float64; give items"),
        (np.array(["a", "b"]), np.ones(2), r"item 3 is of float64, and item 2 of <U1; give items"),
        (({"a": np.zeros(1)},), ({"a": np.zeros(2)},), r"item 3\[0\]\['a'\] has the shape \(2,\)"),
    ],
)
async def test_an_item_that_does_not_fit_is_named(good: Any, bad: Any, message: str) -> None:
    async with batch([good, good, good, bad], 2) as batches:
        await anext(batches)
        for _ in range(2):
            with pytest.raises(InputStructureError, match=message):
                await anext(batches)


async def test_an_item_that_does_not_fit_is_named_as_counted_from_the_first_run() -> None:
    items = [(1,), (1,), (1,), (1, 2)]
    async with take(batch(items, 2), 9) as stage:
        await read_some(stage, 1)
        state = position(stage)
    again = take(batch(items, 2), 9)
    again.load_state_dict(state)
    with pytest.raises(InputStructureError, match="item 3 is a tuple of 2"):
        await read_all(again)


async def notes_of(stage: Stage[Any]) -> list[str]:
    with pytest.raises(BadRecordError) as caught:
        await read_all(stage)
    return caught.value.__notes__


def failing(items: list[Any]) -> Any:
    if 4 in items:
        raise BadRecordError
    return items


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
@pytest.mark.parametrize(
    "around", [lambda each: batch(each, 2), lambda each: prefetch(batch(take(each, 9), 2), 2)]
)
async def test_an_error_of_the_source_names_the_source_alone(
    kind: str, around: Callable[[Any], Stage[Any]]
) -> None:
    source = getattr(Source(5, BadRecordError()), kind)()
    got: list[Any] = []
    with pytest.raises(BadRecordError) as caught:
        async with around(source) as stage:
            async for each in stage:
                got.append(each)
    assert got == [[0, 1], [2, 3]], "full batches before the error come first"
    assert caught.value.__notes__ == [f"in {source!r}, after 5 items"]


@pytest.mark.parametrize("kind", ["items", "items_in_thread"])
@pytest.mark.parametrize("num_items", [0, 1, 3, 5])
@pytest.mark.parametrize("batch_size", [2, 8])
async def test_the_note_counts_the_items_of_a_batch_that_is_not_full(
    kind: str, num_items: int, batch_size: int
) -> None:
    source = getattr(Source(num_items, BadRecordError()), kind)()
    expected = [f"in {source!r}, after {num_items} items"]
    assert await notes_of(batch(source, batch_size)) == expected


async def test_an_error_of_collate_names_the_batch_as_counted_from_the_first_run() -> None:
    assert await notes_of(batch(range(9), 2, collate=failing)) == ["in batch, after 4 items"]
    assert await notes_of(batch(range(5), 2, collate=failing)) == ["in batch, after 4 items"]
    ahead = prefetch(batch(range(5), 2, collate=failing), 1)
    assert await notes_of(ahead) == ["in batch, after 4 items"]
    async with batch(range(9), 2, collate=failing) as stage:
        await read_some(stage, 1)
        state = position(stage)
    again = batch(range(9), 2, collate=failing)
    again.load_state_dict(state)
    assert await notes_of(again) == ["in batch, after 4 items"]
