"""statistics(): counts, bytes, and times of waiting."""

import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from asynchooks import data
from asynchooks.data import Stage, StageStatistics, batch, map_concurrent, prefetch, rollouts
from asynchooks.simulation import Simulation

from .rollouts.learning import on_loops
from .sources import read_all


async def test_items_and_their_bytes_are_counted_in_every_stage() -> None:
    items = [{"x": np.zeros((2, 3), np.float32), "y": (b"abc", 1)} for _ in range(4)]
    stage = prefetch(batch(iter(items), 2), 2)
    assert stage.statistics().num_bytes is None
    await read_all(stage)
    found = [stage.statistics()]
    while found[-1].sources:
        found += found[-1].sources
    counts = [(each.stage, each.num_items, each.num_bytes) for each in found]
    assert counts == [("prefetch", 2, 108), ("batch", 2, 108), ("iterable", 4, 108)]


@pytest.mark.parametrize(
    ("items", "num_bytes"),
    # a long list counts if it begins with something of a size
    [([np.zeros(2)] * 20, 320), ([b"abc"] * 20, 60), ([7] * 20, None)],
)
async def test_bytes_are_counted_where_items_have_a_size(items: Any, num_bytes: int | None) -> None:
    stage = batch(items, len(items), collate=list)
    await read_all(stage)
    assert stage.statistics().num_bytes == num_bytes
    assert stage.statistics().sources[0].num_items == len(items)


MAKES: dict[str, Callable[[Any, Any], Stage[Any]]] = {
    "map": lambda fn, source: data.map(source, fn),
    "map_concurrent": lambda fn, source: map_concurrent(fn, source, 1),
    "unordered": lambda fn, source: map_concurrent(fn, source, 1, ordered=False),
    "rollouts": lambda fn, source: rollouts(fn, source, 1, concurrency=1, max_staleness=0),
}


def statistics_of(
    kind: str, backend: Any, source: float = 0.0, call: float = 0.0, use: float = 0.0
) -> StageStatistics:
    """Those of a pipeline that is read to its end, by what an item takes, in virtual time."""
    simulation = Simulation(0, backend)

    async def numbers() -> AsyncIterator[int]:
        for number in range(8):
            await simulation.sleep(source)
            yield number

    async def work(item: int) -> int:
        await simulation.sleep(call)
        return 1 + item

    async def main() -> StageStatistics:
        async with MAKES[kind](work, numbers()) as stage:
            async for _ in stage:
                await simulation.sleep(use)
        return stage.statistics()

    found: StageStatistics = simulation.run(main)
    return found


def shares(found: StageStatistics) -> tuple[float, float, float]:
    return found.source_share, found.calls_share, found.consumer_share


@on_loops
@pytest.mark.parametrize("kind", MAKES)
def test_a_stage_waits_for_what_is_slow(backend: Any, kind: str) -> None:
    found = statistics_of(kind, backend, source=1.0)
    assert (found.open_secs, shares(found)) == (8.0, (1.0, 0.0, 0.0))
    assert (found.sources[0].open_secs, shares(found.sources[0])) == (8.0, (1.0, 0.0, 0.0))
    assert found.slowest is found.sources[0]
    found = statistics_of(kind, backend, call=2.0)
    assert (found.open_secs, shares(found)) == (16.0, (0.0, 1.0, 0.0))
    assert shares(found.sources[0]) == (0.0, 0.0, 1.0)
    assert found.slowest is found
    assert found.p50_secs == found.p90_secs == found.p99_secs == pytest.approx(2.0, rel=0.032)
    found = statistics_of(kind, backend, use=1.0)
    assert (found.open_secs, shares(found)) == (8.0, (0.0, 0.0, 1.0))
    assert found.slowest is None


@on_loops
def test_quantiles_are_exact_to_a_few_per_cent(backend: Any) -> None:
    simulation = Simulation(0, backend)

    async def main() -> StageStatistics:
        stage = data.map([0.01] * 85 + [0.5] * 10 + [4.0] * 5, simulation.sleep)
        assert math.isnan(stage.statistics().p50_secs)
        await read_all(stage)
        return stage.statistics()

    found = simulation.run(main)
    assert [found.p50_secs, found.p90_secs, found.p99_secs] == pytest.approx(
        [0.01, 0.5, 4.0], rel=0.032
    )


@pytest.mark.parametrize("in_threads", [True, False])
async def test_calls_in_threads_and_those_that_make_a_batch_are_timed(in_threads: bool) -> None:
    stage: Any = map_concurrent(str, range(2), 2) if in_threads else batch([7], 1, collate=str)
    await read_all(stage)
    assert stage.statistics().p50_secs > 0
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
