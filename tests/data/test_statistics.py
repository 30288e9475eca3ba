"""statistics(): counts, bytes, and times of waiting."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import data
from asynchooks.data import Stage, StageStatistics, batch, map_concurrent, prefetch, rollouts
from asynchooks.simulation import Simulation

from ..support.helpers import settle
from .rollouts.learning import on_engines
from .sources import read_all, read_some

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


@pytest.mark.parametrize("source", [[1, 2, 3], np.zeros((3, 2)), lambda: [1, 2, 3]])
async def test_items_that_become_batches_are_counted_in_their_source(source: Any) -> None:
    stage = batch(source, 2)
    assert len(await read_all(stage)) == 2
    assert [each.num_items for each in (stage.statistics(), *stage.statistics().sources)] == [2, 3]


async def test_a_full_buffer_is_counted() -> None:
    async with prefetch(range(9), 3) as stage:
        await settle()
        found = await anyio.to_thread.run_sync(stage.statistics)  # another thread may ask
        assert (found.num_buffered, found.buffer_size, found.num_items) == (3, 3, 0)
        await read_some(stage, 1)
        assert stage.statistics().num_items == 1
    assert stage.statistics().num_buffered == 0


class World:
    """What sources, calls and consumers take, in virtual time."""

    def __init__(self, backend: Any, source: float = 0.0, call: float = 0.0, use: float = 0.0):
        self.simulation = Simulation(0, backend)
        self.secs = {"source": source, "call": call, "use": use}

    async def numbers(self) -> AsyncIterator[int]:
        for number in range(8):
            await self.simulation.sleep(self.secs["source"])
            yield number

    async def call(self, item: Any) -> Any:
        await self.simulation.sleep(self.secs["call"])
        return 1 + item

    def statistics(self, make: Callable[[World], Stage[Any]]) -> StageStatistics:
        """Those of a pipeline that is read to its end."""

        async def main() -> StageStatistics:
            async with make(self) as stage:
                async for _ in stage:
                    await self.simulation.sleep(self.secs["use"])
            return stage.statistics()

        found: StageStatistics = self.simulation.run(main)
        return found


def shares(found: StageStatistics) -> tuple[float, float, float]:
    return found.source_share, found.calls_share, found.consumer_share


MAKES: dict[str, Callable[[World], Stage[Any]]] = {
    "map": lambda world: data.map(world.numbers(), world.call),
    "filter": lambda world: data.filter(world.numbers(), world.call),
    "map_concurrent": lambda world: map_concurrent(world.call, world.numbers(), 1),
    "unordered": lambda world: map_concurrent(world.call, world.numbers(), 1, ordered=False),
    "rollouts": lambda world: rollouts(
        world.call, world.numbers(), 1, concurrency=1, max_staleness=0
    ),
}
makes = pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))


@on_engines
@makes
def test_behind_a_slow_source_a_stage_waits_for_it(
    backend: Any, make: Callable[[World], Stage[Any]]
) -> None:
    found = World(backend, source=1.0).statistics(make)
    assert (found.open_secs, shares(found)) == (8.0, (1.0, 0.0, 0.0))
    assert (found.sources[0].open_secs, shares(found.sources[0])) == (8.0, (1.0, 0.0, 0.0))
    assert found.slowest is found.sources[0]


@on_engines
@makes
def test_a_stage_waits_for_slow_calls(backend: Any, make: Callable[[World], Stage[Any]]) -> None:
    found = World(backend, call=2.0).statistics(make)
    assert (found.open_secs, shares(found)) == (16.0, (0.0, 1.0, 0.0))
    assert shares(found.sources[0]) == (0.0, 0.0, 1.0)
    assert found.slowest is found
    assert found.p50_secs == found.p90_secs == found.p99_secs == pytest.approx(2.0, rel=0.032)


@on_engines
@makes
def test_before_a_slow_consumer_a_stage_waits_to_be_read(
    backend: Any, make: Callable[[World], Stage[Any]]
) -> None:
    found = World(backend, use=1.0).statistics(make)
    assert (found.open_secs, shares(found)) == (8.0, (0.0, 0.0, 1.0))
    assert found.slowest is None


@on_engines
def test_a_stage_that_reads_ahead_waits_for_what_is_slower(backend: Any) -> None:
    def make(world: World) -> Stage[Any]:
        return prefetch(data.map(world.numbers(), world.call), 2)

    # the consumer is slower: it has each of 8 items for 4 s, behind the first 3 s
    found = World(backend, source=1.0, call=2.0, use=4.0).statistics(make)
    mapped = found.sources[0]
    assert found.open_secs == 3.0 + 8 * 4.0
    assert shares(mapped) == (8 / 27, 16 / 27, 3 / 27)  # closed when all is read
    assert shares(found) == (24 / 35, 0.0, 11 / 35)
    assert found.slowest is mapped
    # the source is: all wait for it
    found = World(backend, source=3.0, use=1.0).statistics(make)
    assert found.open_secs == 8 * 3.0 + 1.0
    assert shares(found) == (24 / 25, 0.0, 1 / 25)
    assert shares(found.sources[0]) == (1.0, 0.0, 0.0)
    assert found.slowest is found.sources[0].sources[0]


@on_engines
def test_several_calls_at_a_time_are_waited_for_while_nothing_is_read(backend: Any) -> None:
    found = World(backend, source=1.0, call=8.0).statistics(
        lambda world: map_concurrent(world.call, world.numbers(), 2)
    )
    # two are read in 2 s, and two more as soon as these have ended
    assert shares(found)[0] == pytest.approx(8.0 / found.open_secs)
    assert shares(found)[1] == pytest.approx(1 - 8.0 / found.open_secs)
    assert found.slowest is found


@on_engines
def test_a_wait_that_goes_on_counts_up_to_now(backend: Any) -> None:
    world = World(backend, source=100.0)

    async def main() -> None:
        stage = prefetch(world.numbers(), 1)
        before = stage.statistics()
        assert (before.open_secs, shares(before), before.slowest) == (0.0, (0.0, 0.0, 0.0), None)
        async with stage:
            await world.simulation.sleep(5.0)
            found = stage.statistics()
            assert (found.open_secs, shares(found)) == (5.0, (1.0, 0.0, 0.0))
        await world.simulation.sleep(5.0)
        assert stage.statistics().open_secs == 5.0

    world.simulation.run(main)


@on_engines
def test_quantiles_are_exact_to_a_few_per_cent(backend: Any) -> None:
    simulation = Simulation(0, backend)

    async def call(item: float) -> float:
        await simulation.sleep(item)
        return item

    async def main() -> StageStatistics:
        stage = data.map([0.01] * 85 + [0.5] * 10 + [4.0] * 5, call)
        assert math.isnan(stage.statistics().p50_secs)
        await read_all(stage)
        return stage.statistics()

    found = simulation.run(main)
    assert (found.p50_secs, found.p90_secs, found.p99_secs) == (
        pytest.approx(0.01, rel=0.032),
        pytest.approx(0.5, rel=0.032),
        pytest.approx(4.0, rel=0.032),
    )


async def test_calls_in_threads_and_those_that_make_a_batch_are_timed() -> None:
    for stage in (
        map_concurrent(lambda item: time.sleep(0.01), range(4), 2),
        batch(range(4), 1, collate=lambda items: time.sleep(0.01)),
    ):
        await read_all(stage)
        assert stage.statistics().p50_secs >= 0.0097
        assert stage.statistics().calls_share > 0


def test_its_text_is_a_table_with_a_line_for_each_stage() -> None:
    nan = math.nan
    items = StageStatistics(
        "iterable", 9600, None, 0, 8.0, 0.25, 0.0, 0.75, nan, nan, nan, 0, 0, ()
    )
    made = StageStatistics(
        "map_concurrent", 9600, None, 3, 8.0, 0.01, 0.97, 0.02, 0.012, 0.04, 1.5, 16, 16, (items,)
    )
    last = StageStatistics(
        "prefetch", 300, 4096, 0, 8.0, 0.98, 0.0, 0.02, nan, nan, nan, 1, 2, (made,)
    )
    heads = "waits for:        items  bytes  source  calls  consumer"
    more = "  p50 ms  p90 ms   p99 ms  failed   held"
    assert str(last).splitlines() == [
        heads + more,
        "prefetch            300  4,096     98%     0%        2%" + "1/2".rjust(len(more)),
        "  map_concurrent  9,600             1%    97%        2%"
        "      12      40  1.5e+03       3  16/16  <- slowest",
        "    iterable      9,600            25%     0%       75%",
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
