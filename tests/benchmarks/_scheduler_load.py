"""What one Dask scheduler carries: the processor time that a request and a piece of news cost it.

Its own time, so that it hardly matters what else the machine does. All processes that it serves
are connections of this one, which does not get in its way.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import distributed
import psutil

from asynchooks.distributed import DaskCluster

from ..distributed.processes import Scheduler

NUM_CONNECTIONS, NUM_ADVANCES, NUM_STEPS = 64, 40, 40
_NO_BEATS: dict[str, Any] = {"heartbeat_secs": 1e4, "lease_secs": 1e4}


class Load(NamedTuple):
    """Seconds of the scheduler's processor."""

    advance_secs: float
    """For one request that moves the step, and its answer; a heartbeat costs the same."""
    news_secs: float
    """For telling one process, with its next request, that a step has come that it waits for."""


async def scheduler_load(scheduler: Scheduler) -> Load:
    process = psutil.Process(scheduler.pid)

    def spent() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            distributed.Client(scheduler.address, asynchronous=True, set_as_default=False)
        )
        clusters = [
            await stack.enter_async_context(DaskCluster(client, "load", **_NO_BEATS))
            for _ in range(NUM_CONNECTIONS)
        ]

        async def advance(cluster: DaskCluster) -> None:
            for _ in range(NUM_ADVANCES):
                await cluster.advance()

        before = spent()
        async with anyio.create_task_group() as group:
            for each in clusters:
                group.start_soon(advance, each)
        advance_secs = (spent() - before) / (NUM_CONNECTIONS * NUM_ADVANCES)

        first, *others = clusters
        begin = await first.advance(0)  # the true one
        before = spent()
        for step in range(begin + 1, begin + NUM_STEPS + 1):
            async with anyio.create_task_group() as group:
                for each in others:
                    group.start_soon(each.global_step.wait_for, step)
                await anyio.lowlevel.checkpoint()
                group.start_soon(first.advance)
        news_secs = (spent() - before) / NUM_STEPS / len(others)
    return Load(advance_secs, news_secs)
