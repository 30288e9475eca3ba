"""A program for the command line: rollouts that sleep, and a step that does."""

from __future__ import annotations

import itertools
import random
from typing import Any

import anyio
import numpy as np

from asynchooks import FeedHook, FunctionSessionCreator, MonitoredSession, StopAtStepHook
from asynchooks.data import rollouts
from asynchooks.planning import timed
from asynchooks.protocols import Asynchronous, ParameterServer, ProtocolHook

SECS = (0.008, 0.012, 0.01, 0.016)
_secs = itertools.cycle(SECS)


@timed("rollout", returns=0)
async def rollout(item: int) -> int:
    await anyio.sleep(next(_secs))
    return 0


@timed("learn", returns={"loss": 0.5})
async def learn() -> dict[str, float]:
    await anyio.sleep(0.004)
    return {"loss": 0.5}


async def main(concurrency: int = 4, max_staleness: int = 2, batch_size: int = 2) -> None:
    """Sixty steps."""

    async def step(groups: Any) -> dict[str, float]:
        return await learn()

    source = rollouts(
        rollout, range(10**9), batch_size, concurrency=concurrency, max_staleness=max_staleness
    )
    hooks = [FeedHook(source, "groups"), StopAtStepHook(60)]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        while not session.should_stop():
            await session.run([])


def plain() -> None:
    """Not async."""


@timed("compute", worker=lambda number, chance: number)
async def compute(number: int, chance: random.Random) -> None:
    await anyio.sleep(chance.uniform(0.005, 0.025))


async def gradients(workers: int = 4, num_updates: int = 120) -> None:
    """Workers around a parameter server."""
    server = ParameterServer(np.zeros(1), Asynchronous(), num_workers=workers)

    async def work(number: int) -> None:
        chance = random.Random(number)

        async def step() -> dict[str, float]:
            parameters, version = server.pull(number)
            await compute(number, chance)
            server.push(number, parameters, version)
            return {}

        creator = FunctionSessionCreator(step, global_step=server.global_step)
        hooks = [ProtocolHook(server, number), StopAtStepHook(last_step=num_updates)]
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run([])

    async with anyio.create_task_group() as group:
        for number in range(workers):
            group.start_soon(work, number)
