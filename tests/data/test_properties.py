"""Nothing is lost and nothing comes twice, under any cancellation or failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks.data import Stage, batch, map_concurrent, prefetch, repeat, shuffle

from .recipes import MOST
from .sources import BadRecordError, Source, same_in_thread

pytestmark = pytest.mark.anyio


async def _same(item: Any) -> Any:
    if item % 3 == 0:
        await anyio.lowlevel.checkpoint()
    return item


PIPELINES: dict[str, Callable[[Any, int], Stage[Any]]] = {
    "prefetch": lambda source, size: prefetch(source, size),
    "map": lambda source, size: map_concurrent(_same, source, min(size, MOST)),
    "map in threads": lambda source, size: map_concurrent(same_in_thread, source, min(size, MOST)),
    "map unordered": lambda source, size: map_concurrent(_same, source, min(size, MOST), False),
    "prefetch of prefetch": lambda source, size: prefetch(prefetch(source, size), size),
    "prefetch of map": lambda source, size: prefetch(
        map_concurrent(_same, source, min(size, MOST)), 1
    ),
    "prefetch of batches": lambda source, size: prefetch(batch(source, size), 2),
    "prefetch of shuffle": lambda source, size: prefetch(shuffle(source, size, 1), size),
}


def _flat(items: list[Any]) -> list[int]:
    return [each for item in items for each in (item if isinstance(item, list) else [item])]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=120,
    deadline=None,
)
@given(
    name=st.sampled_from(sorted(PIPELINES)),
    size=st.integers(1, 4),
    kind=st.sampled_from(["items", "items_in_thread"]),
    num_items=st.integers(0, 24),
    fails=st.booleans(),
    plans=st.lists(  # a reader each: when it is cancelled, and how often it waits behind an item
        st.tuples(st.one_of(st.none(), st.integers(0, 24)), st.integers(0, 2)), max_size=4
    ),
    leave_after=st.one_of(st.none(), st.integers(0, 24)),
)
async def test_each_item_goes_to_one_reader_and_a_cancelled_one_loses_none(
    name: str,
    size: int,
    kind: str,
    num_items: int,
    fails: bool,
    plans: list[tuple[int | None, int]],
    leave_after: int | None,
) -> None:
    error = BadRecordError() if fails else None
    source = Source(num_items, error)
    got: list[Any] = []
    by_reader: list[list[Any]] = [[] for _ in plans]
    scopes = [anyio.CancelScope() for _ in plans]
    met: list[BaseException] = []

    def cancel_those_due() -> None:
        for (when, _), scope in zip(plans, scopes, strict=True):
            if when is not None and len(got) >= when:
                scope.cancel()

    async def read(place: int) -> None:
        with scopes[place]:
            try:
                async for item in stage:
                    got.append(item)
                    by_reader[place].append(item)
                    cancel_those_due()
                    for _ in range(plans[place][1]):
                        await anyio.lowlevel.checkpoint()
            except BadRecordError as caught:
                met.append(caught)

    stage = PIPELINES[name](getattr(source, kind)(), size)
    async with stage:
        async with anyio.create_task_group() as group:
            for place in range(len(plans)):
                group.start_soon(read, place)
            await anyio.lowlevel.checkpoint()
            cancel_those_due()
        if leave_after is None:
            try:
                async for item in stage:
                    got.append(item)
            except BadRecordError as caught:
                met.append(caught)
        else:
            for _ in range(leave_after):
                try:
                    got.append(await anext(stage))
                except (StopAsyncIteration, BadRecordError):
                    break
    assert source.num_begun == source.num_closed
    assert all(each is error for each in met)
    items = _flat(got)
    assert len(items) == len(set(items))
    in_order = name not in ("map unordered", "prefetch of shuffle")
    if in_order:
        assert items == list(range(len(items)))
        for each in by_reader:
            assert _flat(each) == sorted(_flat(each))
    if leave_after is None:
        assert bool(met) == fails
        num_kept = num_items // size * size if "batches" in name and fails else num_items
        if name == "prefetch of shuffle" and fails:
            assert set(items) <= set(range(num_items))
        elif name != "map unordered" or not fails:
            assert sorted(items) == list(range(num_kept))


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)
@given(
    num_items=st.integers(1, 6),
    num_epochs=st.integers(1, 4),
    count=st.integers(0, 20),
    size=st.integers(1, 5),
    kind=st.sampled_from(["items", "items_in_thread"]),
)
async def test_every_pass_is_closed_before_the_next_begins(
    num_items: int, num_epochs: int, count: int, size: int, kind: str
) -> None:
    source = Source(num_items)

    def again() -> Any:
        return getattr(source, kind)()

    got: list[int] = []
    async with prefetch(repeat(again, num_epochs), size) as stage:
        async for item in stage:
            got.append(item)
            assert source.num_begun - source.num_closed <= 1
            if len(got) >= count:
                break
    assert got == (list(range(num_items)) * num_epochs)[: max(count, 1)]
    assert source.num_begun == source.num_closed
