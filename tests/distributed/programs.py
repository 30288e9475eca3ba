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
    GlobalStepWaiterHook,
    MonitoredSession,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.distributed import RemoteParameterServer, ServerAddress
from asynchooks.protocols import ProtocolHook

NUM_WORKERS, PER_PROCESS = 12, 4


async def train(
    address: ServerAddress, process: int, last_step: int | None, secs: float, k: int = 0
) -> list[tuple[int, int, int]]:
    """Four workers with sessions: (worker, step at its first run, number of runs)."""
    rows: list[tuple[int, int, int]] = []
    async with RemoteParameterServer(address) as server, anyio.create_task_group() as group:
        for index in range(process * PER_PROCESS, (process + 1) * PER_PROCESS):
            group.start_soon(_train_one, server, index, last_step, secs, k, rows)
    return rows


async def _train_one(
    server: RemoteParameterServer, index: int, last_step: int | None, secs: float, k: int,
    rows: list[tuple[int, int, int]],
) -> None:  # fmt: skip
    versions: list[int] = []

    async def step() -> dict[str, Any]:
        parameters, version = await server.pull(index)
        versions.append(version)
        is_done, _ = await server.compute(version, anyio.sleep, secs)
        if is_done:
            await server.push(index, 2.0 * parameters - index, version)
        return {"version": version}

    hooks: list[Any] = [GlobalStepWaiterHook(k * index), ProtocolHook(server, index)]
    if last_step is not None:
        hooks.append(StopAtStepHook(last_step=last_step))
    creator = FunctionSessionCreator(step, global_step=server.global_step)
    async with MonitoredSession(hooks, creator) as session:
        while not session.should_stop():
            await session.run("version")
    rows.append((index, versions[0] if versions else -1, len(versions)))


async def train_bare(address: ServerAddress, process: int, secs: float) -> int:
    """Four workers without sessions, until training is over; returns how many gradients."""
    num_pushed = 0

    async def work(server: RemoteParameterServer, index: int) -> None:
        nonlocal num_pushed
        try:
            while True:
                await server.begin_step(index)
                parameters, version = await server.pull(index)
                await anyio.sleep(secs)
                await server.push(index, parameters, version)
                num_pushed += 1
                await server.end_step(index)
        except StopTraining:
            await server.leave(index)

    async with RemoteParameterServer(address) as server, anyio.create_task_group() as group:
        for index in range(process * PER_PROCESS, (process + 1) * PER_PROCESS):
            group.start_soon(work, server, index)
    return num_pushed


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
