"""statistics(): counts, bytes, and times of waiting."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks.data import StageStatistics, batch, map_concurrent, prefetch

from ..support.helpers import settle
from .sources import Source, read_all, read_some, same

pytestmark = pytest.mark.anyio


async def test_items_and_their_bytes_are_counted_in_every_stage() -> None:
    items = [{"x": np.zeros((2, 3), np.float32), "y": (b"abc", 1)} for _ in range(4)]
    stage = prefetch(batch(iter(items), 2), 2)
    assert stage.statistics().num_bytes is None
    await read_all(stage)
    found = stage.statistics()
    batches = found.sources[0]
    assert (found.stage, found.num_items) == ("prefetch", 2)
    assert (batches.stage, batches.num_items) == ("batch", 2)
    assert (batches.sources[0].stage, batches.sources[0].num_items) == ("iterable", 4)
    assert found.num_bytes == batches.num_bytes == batches.sources[0].num_bytes == 4 * (24 + 3)
    assert batches.sources[0].sources == ()


async def test_a_full_buffer_is_counted() -> None:
    async with prefetch(range(9), 3) as stage:
        await settle()
        found = await anyio.to_thread.run_sync(stage.statistics)  # another thread may ask
        assert (found.num_buffered, found.buffer_size, found.num_items) == (3, 3, 0)
        await read_some(stage, 1)
        assert stage.statistics().num_items == 1
    assert stage.statistics().num_buffered == 0


WAIT_SECS = 0.05


async def _slowly() -> AsyncIterator[int]:
    for each in range(3):
        await anyio.sleep(WAIT_SECS)
        yield each


async def test_with_a_slow_source_all_wait_for_input_and_none_is_blocked() -> None:
    for stage in (prefetch(_slowly(), 2), batch(_slowly(), 1), map_concurrent(same, _slowly(), 2)):
        await read_all(stage)
        found = stage.statistics()
        assert found.input_wait_secs >= 2.5 * WAIT_SECS
        assert found.consumer_wait_secs >= 2.5 * WAIT_SECS
        assert found.blocked_secs < WAIT_SECS
        assert found.sources[0].input_wait_secs >= 2.5 * WAIT_SECS


async def test_with_a_slow_consumer_producers_are_blocked_and_none_waits() -> None:
    for stage in (
        prefetch(Source(5).items(), 1),
        batch(Source(5).items(), 1),
        map_concurrent(same, Source(5).items(), 1),
    ):
        async with stage:
            for _ in range(4):
                await anext(stage)
                await anyio.sleep(WAIT_SECS)
        found = stage.statistics()
        assert found.blocked_secs >= 2.5 * WAIT_SECS
        assert found.consumer_wait_secs < WAIT_SECS
        assert found.input_wait_secs < WAIT_SECS


async def test_several_consumers_wait_all_together() -> None:
    async with prefetch(Source(0, hangs=True).items(), 1) as stage:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(anext, stage)
            await settle()  # all of them wait
            await anyio.sleep(WAIT_SECS)
            group.cancel_scope.cancel()
        assert stage.statistics().consumer_wait_secs >= 3.5 * WAIT_SECS


def test_its_text_has_a_line_for_each_stage() -> None:
    source = StageStatistics("batch", 1200, None, 0.25, 0.0, 0.5, 0, 0, 0, ())
    text = str(StageStatistics("prefetch", 1200, 4096, 1.5, 0.125, 2.0, 0, 1, 2, (source,)))
    assert text.splitlines() == [
        "prefetch: 1,200 items, 4,096 bytes; waited 1.5 s for input, 0.125 s for its consumer, "
        "which waited 2 s, 1 of 2 held",
        "  batch: 1,200 items; waited 0.25 s for input, 0 s for its consumer, which waited 0.5 s",
    ]


@pytest.mark.parametrize(
    ("items", "num_bytes"),
    [
        ([np.zeros(2)] * 20, 320),
        ([b"abc"] * 20, 60),
        ([7] * 20, None),  # a long list counts if it begins with something of a size
        ([1, "two", 3.0], None),
    ],
)
async def test_bytes_are_counted_where_items_have_a_size(items: Any, num_bytes: int | None) -> None:
    for collate in (list, lambda items: items[0]):
        stage = batch(items, len(items) if collate is list else 1, collate=collate)
        await read_all(stage)
        assert stage.statistics().num_bytes == num_bytes
