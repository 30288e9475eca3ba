"""Stages of asynchooks.data beside SPDL, torchdata, aiostream and PyTorch's DataLoader.

    python -m tests.benchmarks.loaders

Each row is one pipeline, written as the documentation of each library writes it. A figure is ours
over the peer's: wall time, then processor time of all threads and worker processes. Below 1, ours
is the faster one. The runs take turns; what a pipeline needs to start and end counts.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import statistics
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from asynchooks.data import batch, map_concurrent

from ._report import Measure, Row, is_installed, print_rows, rows_of, run_on

NUM_BLOCKS = 5
FETCH_SECS = 0.005
PEERS = {
    "SPDL": "spdl",
    "torchdata": "torchdata",
    "aiostream": "aiostream",
    "DataLoader": "torch",
}
ASYNC = "async no-op, 8 at a time"
THREAD = "no-op in 8 threads"
ZLIB = "zlib in 2 threads"
THREE = "fetch 5 ms, 32 at a time; zlib in 2 threads; batch 32"
NUM_ITEMS = {ASYNC: 4_000, THREAD: 4_000, ZLIB: 640, THREE: 640}

BLOB = bytes(range(256)) * 8 + os.urandom(1 << 15)
Run = Callable[[], Awaitable[int]]
"""One whole pass; returns how many items came out."""


async def same(item: Any, *_: object) -> Any:
    return item


def same_now(item: Any) -> Any:
    return item


def compress(item: int) -> int:
    return len(zlib.compress(BLOB, 6))


async def fetch(item: int, *_: object) -> int:
    await anyio.sleep(FETCH_SECS)
    return item


async def fetch_on_asyncio(item: int) -> int:
    await asyncio.sleep(FETCH_SECS)
    return item


def fetch_now(item: int) -> int:
    time.sleep(FETCH_SECS)
    return item


async def items(num: int) -> AsyncIterator[int]:
    for item in range(num):
        yield item


async def ours(stage: Any) -> int:
    async with stage as opened:
        return sum([1 async for _ in opened])


def thread_of(fn: Callable[[int], Any]) -> Callable[..., Awaitable[Any]]:
    """The function, called in a thread."""

    async def call(item: int, *_: object) -> Any:
        return await anyio.to_thread.run_sync(fn, item)

    return call


def our_runs(row: str, num: int) -> Run:
    stages: dict[str, Callable[[], Any]] = {
        ASYNC: lambda: map_concurrent(same, items(num), 8),
        THREAD: lambda: map_concurrent(same_now, range(num), 8),
        ZLIB: lambda: map_concurrent(compress, range(num), 2),
        THREE: lambda: batch(
            map_concurrent(compress, map_concurrent(fetch, range(num), 32), 2), 32
        ),
    }
    return lambda: ours(stages[row]())


async def of_thread(iterate: Callable[[], int]) -> int:
    """A peer that is not async: in this thread, as its users run it."""
    return iterate()


def spdl_runs(row: str, num: int) -> Run:
    pipeline: Any = importlib.import_module("spdl.pipeline")

    def build() -> Any:
        builder = pipeline.PipelineBuilder().add_source(range(num))
        if row == ASYNC:
            return builder.pipe(same, concurrency=8).add_sink(8).build(num_threads=1)
        if row == THREAD:
            return builder.pipe(same_now, concurrency=8).add_sink(8).build(num_threads=8)
        if row == THREE:
            builder.pipe(fetch_on_asyncio, concurrency=32)
        builder.pipe(compress, concurrency=2)
        if row == THREE:
            builder.aggregate(32)
        return builder.add_sink(8).build(num_threads=2)

    def iterate() -> int:
        made = build()
        with made.auto_stop():
            return sum(1 for _ in made)

    return partial(of_thread, iterate)


def torchdata_runs(row: str, num: int) -> Run | None:
    tn: Any = importlib.import_module("torchdata.nodes")  # it has no types
    if row == ASYNC:
        return None

    def iterate() -> int:
        node = tn.IterableWrapper(range(num))
        if row == THREE:
            node = tn.ParallelMapper(node, fetch_now, num_workers=32, method="thread")
        fn, threads = (same_now, 8) if row == THREAD else (compress, 2)
        node = tn.ParallelMapper(node, fn, num_workers=threads, method="thread")
        if row == THREE:
            node = tn.Batcher(node, 32, drop_last=False)
        return sum(1 for _ in tn.Loader(node))

    return partial(of_thread, iterate)


def aiostream_runs(row: str, num: int) -> Run:
    stream: Any = importlib.import_module("aiostream.stream")

    def build() -> Any:
        if row == ASYNC:
            return stream.map(items(num), same, ordered=True, task_limit=8)
        if row == THREAD:
            return stream.map(items(num), thread_of(same_now), ordered=True, task_limit=8)
        source = items(num)
        if row == THREE:
            source = stream.map(source, fetch, ordered=True, task_limit=32)
        made = stream.map(source, thread_of(compress), ordered=True, task_limit=2)
        return stream.chunks(made, 32) if row == THREE else made

    async def iterate() -> int:
        async with build().stream() as streamer:
            return sum([1 async for _ in streamer])

    return iterate


class Files:
    """A map-style dataset of PyTorch's."""

    def __init__(self, num: int, row: str) -> None:
        self.num, self.row = num, row

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, item: int) -> int:
        if self.row == THREAD:
            return item
        return compress(fetch_now(item) if self.row == THREE else item)


def dataloader_runs(row: str, num: int) -> Run | None:
    torch_data: Any = importlib.import_module("torch.utils.data")
    if row == ASYNC:
        return None

    def iterate() -> int:
        size = 32 if row == THREE else None
        loader: Iterable[Any] = torch_data.DataLoader(
            Files(num, row), batch_size=size, num_workers=2, collate_fn=list if size else same_now
        )
        return sum(1 for _ in loader)

    return partial(of_thread, iterate)


MAKERS: dict[str, Callable[[str, int], Run | None]] = {
    "SPDL": spdl_runs,
    "torchdata": torchdata_runs,
    "aiostream": aiostream_runs,
    "DataLoader": dataloader_runs,
}
HAS_NONE = {(ASYNC, "torchdata"), (ASYNC, "DataLoader")}
MEASURES = [
    Measure(f"{row}: ours / {peer}, wall and processor time", bar="<= 1", peer=PEERS[peer])
    for row in NUM_ITEMS
    for peer in PEERS
    if (row, peer) not in HAS_NONE
]


async def timed(run: Run, expected: int) -> tuple[float, float]:
    """(Wall, processor) seconds of one pass; processor time is that of children, too."""
    wall, before = time.perf_counter(), os.times()
    found = await run()
    wall, after = time.perf_counter() - wall, os.times()
    if found != expected:
        raise AssertionError(f"{found} items came out, and not {expected}")
    return wall, sum(after[:4]) - sum(before[:4])


async def measured(loop: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for row, num in NUM_ITEMS.items():
        runs: dict[str, Run] = {"ours": our_runs(row, num)}
        for peer, module in PEERS.items():
            is_of_asyncio = peer == "aiostream"
            if is_installed(module) and not (is_of_asyncio and loop == "trio"):
                run = MAKERS[peer](row, num)
                if run is not None:
                    runs[peer] = run
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for block in range(NUM_BLOCKS + 1):
            for name, run in runs.items():
                times = await timed(run, -(-num // 32) if row == THREE else num)
                if block:  # the first one starts what a process has once
                    taken[name].append(times)
        for peer in PEERS:
            if peer in taken:
                pairs = list(zip(taken["ours"], taken[peer], strict=True))
                ratios = [statistics.median([a[i] / b[i] for a, b in pairs]) for i in (0, 1)]
                name = f"{row}: ours / {peer}, wall and processor time"
                found[name] = " / ".join(f"{each:.2f}" for each in ratios)
    return {measure.name: found.get(measure.name, "-") for measure in MEASURES}


def figures(loop: str) -> dict[str, str]:
    return run_on(loop, measured, loop)


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
