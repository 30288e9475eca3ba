"""A Dask cluster of real processes, and the ways to reach it on asyncio and on trio."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
from distributed import Client

from asynchooks import GlobalStep
from asynchooks.distributed import SourceState


@asynccontextmanager
async def native(address: str) -> AsyncIterator[Any]:
    """A client on the running event loop, if it is asyncio's; else a synchronous one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with Client(address, set_as_default=False) as client:
            yield client
        return
    async with Client(address, asynchronous=True, set_as_default=False) as client:
        yield client


def addresses(client: Any) -> list[str]:
    return sorted(client.nthreads())


async def results(futures: list[Any]) -> list[Any]:
    """What tasks of a synchronous client returned; the first error is raised."""
    return [await anyio.to_thread.run_sync(each.result) for each in futures]


async def comes(fact: Callable[[], bool]) -> None:
    """Wait until something is so."""
    with anyio.fail_after(60):
        while not fact():  # noqa: ASYNC110
            await anyio.sleep(0.005)


async def until_state(step: GlobalStep, state: SourceState) -> None:
    await comes(lambda: step.statistics().source is state)


async def until(counts: Any, **expected: int) -> dict[str, int]:
    """Wait until the statistics say so: only the host knows, and is asked again and again."""
    with anyio.fail_after(60):
        while True:
            found: dict[str, int] = await counts.statistics()
            if expected.items() <= found.items():
                return found
            await anyio.sleep(0.005)
