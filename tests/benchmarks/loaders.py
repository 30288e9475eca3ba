"""Stages of asynchooks.data beside SPDL, torchdata, aiostream and PyTorch's DataLoader.

    python -m tests.benchmarks.loaders

Each row is one pipeline, written as the documentation of each library writes it. A figure is ours
over the peer's: wall time, then processor time of all threads and worker processes. Below 1, ours
is the faster one. The runs take turns; what a pipeline needs to start and end counts.
"""

import asyncio
import importlib
import os
import statistics
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from asynchooks.data import batch, map_concurrent

from ._report import is_installed, measure

NUM_BLOCKS = 5
FETCH_SECS = 0.005
PEERS = {"SPDL": "spdl", "torchdata": "torchdata", "aiostream": "aiostream", "DataLoader": "torch"}
ASYNC = "async no-op, 8 at a time"
THREAD = "no-op in 8 threads"
ZLIB = "zlib in 2 threads"
THREE = "fetch 5 ms, 32 at a time; zlib in 2 threads; batch 32"

BLOB = bytes(range(256)) * 8 + os.urandom(1 << 15)
Run = Callable[[], Awaitable[int]]
"""One whole pass; returns how many items came out."""


async def items(num: int) -> AsyncIterator[int]:
    for item in range(num):
        yield item


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


ROWS: dict[str, tuple[int, Callable[..., Any], int]] = {
    ASYNC: (4_000, same, 8), THREAD: (4_000, same_now, 8),
    ZLIB: (640, compress, 2), THREE: (640, compress, 2),
}  # fmt: skip
"""How many items, what is done with each, and how many at a time."""


async def num_of_async(manager: Any) -> int:
    async with manager as opened:
        return sum([1 async for _ in opened])


async def num_of(new: Callable[[], Any]) -> int:
    """A peer that is not async: in this thread, as its users run it."""
    return sum(1 for _ in new())


def our_stages(row: str, num: int) -> Any:
    _, fn, at_a_time = ROWS[row]
    if row == THREE:
        return batch(map_concurrent(fn, map_concurrent(fetch, range(num), 32), at_a_time), 32)
    return map_concurrent(fn, range(num), at_a_time)


async def spdl_pass(row: str, num: int) -> int:
    pipeline: Any = importlib.import_module("spdl.pipeline")
    builder, (_, fn, at_a_time) = pipeline.PipelineBuilder().add_source(range(num)), ROWS[row]
    if row == THREE:
        builder.pipe(fetch_on_asyncio, concurrency=32)
    builder.pipe(fn, concurrency=at_a_time)
    if row == THREE:
        builder.aggregate(32)
    made = builder.add_sink(8).build(num_threads=1 if row == ASYNC else at_a_time)
    with made.auto_stop():
        return sum(1 for _ in made)


def torchdata_nodes(row: str, num: int) -> Any:
    tn: Any = importlib.import_module("torchdata.nodes")  # it has no types
    node, (_, fn, threads) = tn.IterableWrapper(range(num)), ROWS[row]
    if row == THREE:
        node = tn.ParallelMapper(node, fetch_now, num_workers=32, method="thread")
    node = tn.ParallelMapper(node, fn, num_workers=threads, method="thread")
    return tn.Loader(tn.Batcher(node, 32, drop_last=False) if row == THREE else node)


def aiostream_stages(row: str, num: int) -> Any:
    stream: Any = importlib.import_module("aiostream.stream")
    _, fn, at_a_time = ROWS[row]

    async def in_thread(item: int, *_: object) -> Any:
        return await anyio.to_thread.run_sync(fn, item)

    source = items(num)
    if row == THREE:
        source = stream.map(source, fetch, ordered=True, task_limit=32)
    applied = same if row == ASYNC else in_thread
    mapped = stream.map(source, applied, ordered=True, task_limit=at_a_time)
    return stream.chunks(mapped, 32) if row == THREE else mapped


class Files:
    """A map-style dataset of PyTorch's."""

    def __init__(self, row: str, num: int) -> None:
        self.row, self.num = row, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, item: int) -> Any:
        return ROWS[self.row][1](fetch_now(item) if self.row == THREE else item)


def dataloader(row: str, num: int) -> Any:
    torch_data: Any = importlib.import_module("torch.utils.data")
    size = 32 if row == THREE else None
    collate = list if size else same_now
    return torch_data.DataLoader(
        Files(row, num), batch_size=size, num_workers=2, collate_fn=collate
    )


RUNS: dict[str, Callable[[str, int], Awaitable[int]]] = {
    "ours": lambda *args: num_of_async(our_stages(*args)),
    "SPDL": spdl_pass,
    "torchdata": lambda *args: num_of(partial(torchdata_nodes, *args)),
    "aiostream": lambda *args: num_of_async(aiostream_stages(*args).stream()),
    "DataLoader": lambda *args: num_of(partial(dataloader, *args)),
}


def is_there(row: str, peer: str, loop: str) -> bool:
    if not is_installed(PEERS[peer]) or (peer == "aiostream" and loop == "trio"):
        return False
    return row != ASYNC or peer in ("SPDL", "aiostream")


async def timed(run: Run, expected: int) -> tuple[float, float]:
    """(Wall, processor) seconds of one pass; processor time is that of children, too."""
    wall, before = time.perf_counter(), os.times()
    found = await run()
    wall, after = time.perf_counter() - wall, os.times()
    assert found == expected, f"{found} items came out, and not {expected}"
    return wall, sum(after[:4]) - sum(before[:4])


async def figures(loop: str) -> dict[str, str]:
    found = {}
    for row, (num, *_) in ROWS.items():
        peers = [peer for peer in PEERS if is_there(row, peer, loop)]
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ("ours", *peers)}
        for block in range(NUM_BLOCKS + 1):
            for name, times in taken.items():
                run = partial(RUNS[name], row, num)
                secs = await timed(run, -(-num // 32) if row == THREE else num)
                if block:  # the first one starts what a process has once
                    times.append(secs)
        for peer in peers:
            pairs = list(zip(taken["ours"], taken[peer], strict=True))
            ratios = [statistics.median([a[i] / b[i] for a, b in pairs]) for i in (0, 1)]
            found[f"{row}: ours / {peer}, wall and processor time"] = " / ".join(
                f"{each:.2f}" for each in ratios
            )
    return found


if __name__ == "__main__":
    measure(figures)
