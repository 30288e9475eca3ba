"""A Dask cluster of real processes, and the ways to reach it on asyncio and on trio."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import distributed

from asynchooks import StopTraining
from asynchooks.distributed import RemoteParameterServer

from .processes import ROOT


@contextmanager
def local_cluster(num_workers: int = 3) -> Iterator[Any]:
    """A synchronous client of workers on loopback, each a process of its own."""
    with (
        distributed.LocalCluster(
            n_workers=num_workers,
            threads_per_worker=4,
            processes=True,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@asynccontextmanager
async def native(client: Any) -> AsyncIterator[Any]:
    """A client on the running event loop, if it is asyncio's; else the synchronous one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        yield client
        return
    address = client.scheduler.address
    async with distributed.Client(address, asynchronous=True, set_as_default=False) as own:
        yield own


def addresses(client: Any) -> list[str]:
    return sorted(client.nthreads())


async def results(futures: list[Any]) -> list[Any]:
    """What tasks of a synchronous client returned; the first error is raised."""
    return [await anyio.to_thread.run_sync(each.result) for each in futures]


async def comes(fact: Callable[[], bool]) -> None:
    """Wait until something is so."""
    with anyio.fail_after(20):
        while True:
            if fact():
                return
            await anyio.sleep(0.005)


async def until(server: RemoteParameterServer, **counts: int) -> dict[str, int]:
    """Wait until the statistics say so."""
    with anyio.fail_after(20):
        while True:
            statistics = await server.statistics()
            if all(statistics[name] == count for name, count in counts.items()):
                return statistics
            await anyio.sleep(0.005)


async def is_stopped(waiting: Any) -> bool:
    """Whether a wait ended because training is over."""
    try:
        await waiting
    except StopTraining:
        return True
    return False


@contextmanager
def other_process(scheduler: str, address: Any, program: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a client of its own that runs a function of `programs`."""
    code = (
        "import sys; from tests.distributed import programs; "
        f"programs.run({program!r}, {scheduler!r}, {tuple(address)!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
