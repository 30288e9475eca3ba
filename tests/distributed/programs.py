"""What processes of a training run, in tasks on Dask's workers."""

from typing import Any

import anyio
import numpy as np

from asynchooks import FunctionSessionCreator, MonitoredSession, StopAtStepHook
from asynchooks.distributed import RemoteParameterServer, ServerAddress
from asynchooks.protocols import ProtocolHook

NUM_WORKERS, PER_PROCESS = 12, 4
ONES = np.ones(2)


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


async def push_and_end(server: RemoteParameterServer, worker: int) -> int:
    """One synchronous step; the version after it."""
    await server.begin_step(worker)
    await server.push(worker, ONES, (await server.pull(worker)).version)
    await server.end_step(worker)
    return (await server.pull(worker)).version


async def push_and_end_there(address: ServerAddress) -> int:
    async with RemoteParameterServer(address) as server:
        return await push_and_end(server, 1)
