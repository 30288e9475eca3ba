"""What the stages of asynchooks.data hide, and what they cost beside aiostream and torchdata.

    python -m tests.benchmarks.data

Waits are real sleeps. Costs are those of items of no size, for each item, over a bare async
generator (or, for the peers that are not async, a bare generator).
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio

from asynchooks import FeedHook, FunctionSessionCreator, MonitoredSession
from asynchooks.data import batch, map_concurrent, prefetch

from ._report import Measure, Row, is_installed, print_rows, rows_of, run_on, typical

NUM_ITEMS, NUM_BLOCKS = 20_000, 7

PLAIN = "fetch 10 ms, step 10 ms, plain loop: time per batch / 10 ms"
HIDDEN = "the same, FeedHook(prefetch(source, 2))"
EIGHT = "8 fetches of 40 ms at a time, steps of 5 ms, FeedHook(map_concurrent): per batch / 5 ms"
PREFETCH = "prefetch(source, 8): us per item over a bare async generator"
PREFETCH_ONE = "prefetch(source, 1): the same"
BATCH = "batch(source, 32): us per item over a bare async generator"
CHUNKS = "batch(source, 32) / aiostream's chunks"
MAP = "map_concurrent(async function, 8) / aiostream's map, 8 at a time, ordered"
NODES_PREFETCH = "prefetch(iterable, 8) / torchdata's Prefetcher, 8"
NODES_BATCH = "batch(list, 32) / torchdata's Batcher"
NODES_MAP = "map_concurrent(function, 8) in threads / torchdata's ParallelMapper, 8 threads"
MEASURES = [
    Measure(PLAIN),
    Measure(HIDDEN, bar="<= 1.10"),
    Measure(EIGHT, bar="<= 1.15"),
    Measure(PREFETCH, bar="<= 10"),
    Measure(PREFETCH_ONE, bar="<= 10"),
    Measure(BATCH, bar="<= 1"),
    Measure(CHUNKS, bar="< 1", peer="aiostream"),
    Measure(MAP, bar="< 1", peer="aiostream"),
    Measure(NODES_PREFETCH, bar="< 1", peer="torchdata"),
    Measure(NODES_BATCH, bar="< 1", peer="torchdata"),
    Measure(NODES_MAP, bar="< 1", peer="torchdata"),
]
Contender = Callable[[int], Any]


async def items(num: int, secs: float = 0.0) -> AsyncIterator[int]:
    for item in range(num):
        if secs:
            await anyio.sleep(secs)
        yield item


async def seconds_per_item(source: AsyncIterable[Any], num: int) -> float:
    begun = time.perf_counter()
    async for _ in source:
        pass
    return (time.perf_counter() - begun) / num


async def opened(source: AbstractAsyncContextManager[AsyncIterable[Any]], num: int) -> float:
    begun = time.perf_counter()
    async with source as stream:
        async for _ in stream:
            pass
    return (time.perf_counter() - begun) / num


async def looped(nodes: Iterable[Any], num: int) -> float:
    begun = time.perf_counter()
    for _ in nodes:
        pass
    return (time.perf_counter() - begun) / num


async def looped_nodes(kind: str, num: int) -> float:
    return await looped(nodes(kind, num), num)


async def same(item: int, *_: object) -> int:
    return item


def same_now(item: int) -> int:
    return item


async def plain_loop(num: int) -> float:
    begun = time.perf_counter()
    async for _ in items(num, 0.01):
        await anyio.sleep(0.01)
    return (time.perf_counter() - begun) / num


async def trained(source: Any, step_secs: float, num: int) -> float:
    """Seconds per batch, when the pipeline has filled."""
    moments: list[float] = []

    async def step(item: int) -> dict[str, float]:
        await anyio.sleep(step_secs)
        moments.append(time.perf_counter())
        return {}

    async with MonitoredSession(
        [FeedHook(source, "item")], FunctionSessionCreator(step)
    ) as session:
        while not session.should_stop():
            await session.run([])
    skipped = num // 5
    return (moments[-1] - moments[skipped]) / (len(moments) - 1 - skipped)


async def fetch(item: int) -> int:
    await anyio.sleep(0.04)
    return item


def nodes(kind: str, num: int) -> Iterable[Any]:
    tn: Any = importlib.import_module("torchdata.nodes")  # it has no types

    source = tn.IterableWrapper(range(num))
    made: dict[str, Callable[[], Any]] = {
        "prefetch": lambda: tn.Prefetcher(source, 8),
        "batch": lambda: tn.Batcher(source, 32, drop_last=False),
        "map": lambda: tn.ParallelMapper(source, same_now, num_workers=8, method="thread"),
    }
    loader: Iterable[Any] = tn.Loader(made[kind]())
    return loader


def contenders(loop: str) -> dict[str, Contender]:
    """By name, what takes seconds per item."""
    found: dict[str, Contender] = {
        "bare": lambda n: seconds_per_item(items(n), n),
        "prefetch": lambda n: opened(prefetch(items(n), 8), n),
        "prefetch 1": lambda n: opened(prefetch(items(n), 1), n),
        "batch": lambda n: seconds_per_item(batch(items(n), 32), n),
        "map": lambda n: opened(map_concurrent(same, items(n), 8), n),
        "prefetch iterable": lambda n: opened(prefetch(iter(range(n)), 8), n),
        "batch list": lambda n: seconds_per_item(batch(range(n), 32), n),
        "map threads": lambda n: opened(map_concurrent(same_now, range(n), 8), n),
    }
    if is_installed("aiostream") and loop != "trio":
        from aiostream import stream

        chunks: Any = stream.chunks
        mapped: Any = stream.map
        found["aio chunks"] = lambda n: opened(chunks(items(n), 32).stream(), n)
        found["aio map"] = lambda n: opened(
            mapped(items(n), same, ordered=True, task_limit=8).stream(), n
        )
    if is_installed("torchdata"):
        for kind in ("prefetch", "batch", "map"):
            found[f"nodes {kind}"] = partial(looped_nodes, kind)
    return found


async def measured(loop: str) -> dict[str, str]:
    taken: dict[str, list[float]] = {}
    for _ in range(NUM_BLOCKS):
        for name, contender in contenders(loop).items():
            num = NUM_ITEMS // 10 if "map" in name or "nodes" in name else NUM_ITEMS
            taken.setdefault(name, []).append(await contender(num))

    def over(name: str) -> str:
        return typical([1e6 * (a - b) for a, b in zip(taken[name], taken["bare"], strict=True)], 2)

    def ratio(name: str, peer: str) -> str:
        if peer not in taken:
            return "-"
        return typical([a / b for a, b in zip(taken[name], taken[peer], strict=True)], 2)

    rounds = range(3)
    plain = [await plain_loop(50) / 0.01 for _ in rounds]
    hidden = [await trained(prefetch(items(100, 0.01), 2), 0.01, 100) / 0.01 for _ in rounds]
    eight = [
        await trained(map_concurrent(fetch, items(200), 8), 0.005, 200) / 0.005 for _ in rounds
    ]
    return {
        PLAIN: f"{statistics.median(plain):.2f}",
        HIDDEN: f"{statistics.median(hidden):.2f}",
        EIGHT: f"{statistics.median(eight):.2f}",
        PREFETCH: over("prefetch"),
        PREFETCH_ONE: over("prefetch 1"),
        BATCH: over("batch"),
        CHUNKS: ratio("batch", "aio chunks"),
        MAP: ratio("map", "aio map"),
        NODES_PREFETCH: ratio("prefetch iterable", "nodes prefetch"),
        NODES_BATCH: ratio("batch list", "nodes batch"),
        NODES_MAP: ratio("map threads", "nodes map"),
    }


def figures(loop: str) -> dict[str, str]:
    return run_on(loop, measured, loop)


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
