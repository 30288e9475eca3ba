"""What processes of a training run: tasks on Dask's workers, and processes with a client."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import anyio
import anyio.to_thread
import distributed
import numpy as np

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    StopAtStepHook,
)
from asynchooks.distributed import RemoteParameterServer, ServerAddress
from asynchooks.protocols import ProtocolHook

NUM_WORKERS, PER_PROCESS = 12, 4


async def train(
    address: ServerAddress, process: int, last_step: int | None, secs: float
) -> list[tuple[int, int]]:
    """Four workers with sessions: (worker, number of runs)."""
    rows: list[tuple[int, int]] = []

    async def work(server: RemoteParameterServer, index: int) -> None:
        num_runs = 0

        async def step() -> dict[str, Any]:
            nonlocal num_runs
            num_runs += 1
            parameters, version = await server.pull(index)
            is_done, _ = await server.compute(version, anyio.sleep, secs)
            if is_done:
                await server.push(index, 2.0 * parameters - index, version)
            return {"version": version}

        hooks: list[Any] = [ProtocolHook(server, index)]
        if last_step is not None:
            hooks.append(StopAtStepHook(last_step=last_step))
        creator = FunctionSessionCreator(step, global_step=server.global_step)
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run("version")
        rows.append((index, num_runs))

    async with RemoteParameterServer(address) as server, anyio.create_task_group() as group:
        for index in range(process * PER_PROCESS, (process + 1) * PER_PROCESS):
            group.start_soon(work, server, index)
    return rows


async def wait_one_step(server: RemoteParameterServer) -> None:
    """Worker 1 pushes, waits for the end of its step, and prints both."""
    await server.begin_step(1)
    version = (await server.pull(1)).version
    await server.push(1, np.ones(2), version)
    print("pushed", flush=True)
    await server.end_step(1)
    await server.begin_step(1)
    print(f"went on at {(await server.pull(1)).version}", flush=True)


async def wait_one_step_on_request(server: RemoteParameterServer) -> None:
    print("here", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)
    await wait_one_step(server)


async def crash_in_a_step(server: RemoteParameterServer) -> None:
    await server.begin_step(1)
    print("begun", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)
    raise ZeroDivisionError


def run(program: str, scheduler: str, address: tuple[str, str]) -> None:
    async def main() -> None:
        async with distributed.Client(scheduler, asynchronous=True) as client:
            async with RemoteParameterServer(ServerAddress(*address), client) as server:
                await globals()[program](server)

    asyncio.run(main())
