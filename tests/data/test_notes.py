"""Notes of errors: where in the pipeline they came from, and after how many items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynchooks.data import Stage, batch, prefetch, take

from .sources import BadRecordError, Source, position, read_all, read_some

pytestmark = pytest.mark.anyio


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
    source = getattr(Source(4, BadRecordError()), kind)()
    assert await notes_of(around(source)) == [f"in {source!r}, after 4 items"]


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
    async with batch(range(9), 2, collate=failing) as stage:
        await read_some(stage, 1)
        state = position(stage)
    again = batch(range(9), 2, collate=failing)
    again.load_state_dict(state)
    assert await notes_of(again) == ["in batch, after 4 items"]
