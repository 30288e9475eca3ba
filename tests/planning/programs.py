"""Programs that are recorded, and planned."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asynchooks import FeedHook, FunctionSessionCreator
from asynchooks.data import rollouts
from asynchooks.planning import record, span, timed
from asynchooks.protocols import Asynchronous, ParameterServer, ProtocolHook

from ..support.step_loops import run_steps


@timed("rollout", output_size=float, returns=lambda item, drawn: int(drawn.size))
async def rollout(item: int) -> int:
    await anyio.sleep(0.001)
    return item % 5 + 1


@timed("learn", input_size=sum, returns={"loss": 0.5})
async def learn(groups: Sequence[int]) -> dict[str, float]:
    await anyio.sleep(0.001)
    with span("reward"):
        pass
    return {"loss": 0.5}


async def learner(
    concurrency: int = 4, num_steps: int = 30, max_staleness: int = 2, **more: Any
) -> None:
    """Rollouts and a learner."""

    async def step(groups: Any) -> dict[str, float]:
        return await learn([each.result if hasattr(each, "result") else each for each in groups])

    source = rollouts(
        rollout, range(10**9), 2, concurrency=concurrency, max_staleness=max_staleness
    )
    await run_steps(step, num_steps, FeedHook(source, "groups"))


@timed("compute", worker=lambda number: number)
async def compute(number: int) -> None:
    await anyio.sleep(0.002)


async def gradients(workers: int = 3, num_updates: int = 30) -> None:
    """Workers around a parameter server."""
    server = ParameterServer(np.zeros(2), Asynchronous(), num_workers=workers)

    async def work(number: int) -> None:
        async def step() -> dict[str, float]:
            parameters, version = server.pull(number)
            await compute(number)
            server.push(number, parameters, version)
            return {}

        creator = FunctionSessionCreator(step, global_step=server.global_step)
        await run_steps(creator, num_updates, ProtocolHook(server, number))

    async with anyio.create_task_group() as group:
        for number in range(workers):
            group.start_soon(work, number)


def record_until_killed(backend: str, path: Path, connection: Connection) -> None:
    """Record the learner; says when it has begun."""

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(learner, 4, 10**9)
            await anyio.sleep(0.2)
            connection.send("begun")

    with record(path, settings={"concurrency": 4}):
        anyio.run(main, backend=backend)
