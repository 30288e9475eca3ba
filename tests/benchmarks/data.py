"""What the stages of asynchooks.data hide, and what they cost beside aiostream and torchdata.

    python -m tests.benchmarks.data

Waits are real sleeps. Costs are those of items of no size, for each item, over a bare async
generator (or, for the peers that are not async, a bare generator).
"""

import importlib
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any

import anyio

from asynchooks import FeedHook, MonitoredSession
from asynchooks.data import batch, map_concurrent, prefetch

from ._report import is_installed, measure, median_ratio, typical
from .loaders import items, num_of_async

NUM_ITEMS, NUM_BLOCKS = 20_000, 7

PLAIN = "fetch 10 ms, step 10 ms, plain loop: time per batch / 10 ms"
HIDDEN = "the same, FeedHook(prefetch(source, 2))"
EIGHT = "8 fetches of 40 ms at a time, steps of 5 ms, FeedHook(map_concurrent): per batch / 5 ms"
RATIOS = {
    "batch(source, 32)": "aiostream's chunks",
    "prefetch(iterable, 8)": "torchdata's Prefetcher, 8",
    "batch(list, 32)": "torchdata's Batcher",
}


async def read(num: int, secs: float) -> AsyncIterator[int]:
    for item in range(num):
        await anyio.sleep(secs)
        yield item


async def fetch(item: int) -> int:
    await anyio.sleep(0.04)
    return item


async def secs_per_item(source: Any, num: int) -> float:
    """Of a source that is async, or has to be opened, or is neither."""
    begun = time.perf_counter()
    if hasattr(source, "__aiter__") or hasattr(source, "__aenter__"):
        await num_of_async(source if hasattr(source, "__aenter__") else nullcontext(source))
    else:
        sum(1 for _ in source)
    return (time.perf_counter() - begun) / num


async def trained(source: Any, step_secs: float, num: int) -> float:
    """Seconds per batch, when the pipeline has filled."""
    moments: list[float] = []

    async def step(item: int) -> dict[str, float]:
        await anyio.sleep(step_secs)
        moments.append(time.perf_counter())
        return {}

    hooks = [FeedHook(source, "item")]
    async with MonitoredSession(hooks, step) as session:
        while not session.should_stop():
            await session.run([])
    skipped = num // 5
    return (moments[-1] - moments[skipped]) / (len(moments) - 1 - skipped)


def contenders(loop: str) -> dict[str, Callable[[int], Any]]:
    """By name, what is read to its end."""
    found: dict[str, Callable[[int], Any]] = {
        "bare": items,
        "prefetch(source, 8)": lambda n: prefetch(items(n), 8),
        "prefetch(source, 1)": lambda n: prefetch(items(n), 1),
        "batch(source, 32)": lambda n: batch(items(n), 32),
        "prefetch(iterable, 8)": lambda n: prefetch(iter(range(n)), 8),
        "batch(list, 32)": lambda n: batch(range(n), 32),
    }
    if is_installed("aiostream") and loop != "trio":
        stream: Any = importlib.import_module("aiostream.stream")
        found["aiostream's chunks"] = lambda n: stream.chunks(items(n), 32).stream()
    if is_installed("torchdata"):
        tn: Any = importlib.import_module("torchdata.nodes")  # it has no types
        found |= {
            "torchdata's Prefetcher, 8": lambda n: tn.Loader(
                tn.Prefetcher(tn.IterableWrapper(range(n)), 8)
            ),
            "torchdata's Batcher": lambda n: tn.Loader(
                tn.Batcher(tn.IterableWrapper(range(n)), 32, drop_last=False)
            ),
        }
    return found


async def figures(loop: str) -> dict[str, str]:
    taken: dict[str, list[float]] = {}
    for _ in range(NUM_BLOCKS):
        for name, new in contenders(loop).items():
            num = NUM_ITEMS // 10 if "torchdata" in name else NUM_ITEMS
            taken.setdefault(name, []).append(await secs_per_item(new(num), num))
    found = {}
    for stage in ("prefetch(source, 8)", "prefetch(source, 1)", "batch(source, 32)"):
        more = [1e6 * (a - b) for a, b in zip(taken[stage], taken["bare"], strict=True)]
        found[f"{stage}: us per item over a bare async generator"] = typical(more)
    for stage, peer in RATIOS.items():
        if peer in taken:
            found[f"{stage} / {peer}"] = median_ratio(taken[stage], taken[peer])

    async def plain_loop() -> float:
        begun = time.perf_counter()
        async for _ in read(50, 0.01):
            await anyio.sleep(0.01)
        return (time.perf_counter() - begun) / 50

    pipelines: dict[str, tuple[float, Callable[[], Any]]] = {
        PLAIN: (0.01, plain_loop),
        HIDDEN: (0.01, lambda: trained(prefetch(read(100, 0.01), 2), 0.01, 100)),
        EIGHT: (0.005, lambda: trained(map_concurrent(fetch, items(200), 8), 0.005, 200)),
    }
    for name, (secs, run) in pipelines.items():
        found[name] = f"{statistics.median([await run() / secs for _ in range(3)]):.2f}"
    return found


if __name__ == "__main__":
    measure(figures)
