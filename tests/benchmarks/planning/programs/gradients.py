"""Asynchronous SGD around a parameter server that takes one gradient at a time."""

import asyncio

import anyio
import numpy as np

from asynchooks import FunctionSessionCreator
from asynchooks.planning import timed
from asynchooks.protocols import ParameterServer, ProtocolHook, parse_protocol

from . import train_for

COMPUTE_SECS, SERVICE_SECS = 0.08, 0.006
SLOWER = 1.6
"""Every fourth worker takes so many times as long."""


async def main(
    num_workers: int = 8, protocol: str = "async", is_seen: bool = False, secs: float = 20.0
) -> None:
    """Train for so many seconds.

    Args:
        num_workers: each with a machine of its own.
        protocol: as `parse_protocol` reads it.
        is_seen: whether the queue at the server is the program's; else it is within the timed push.
        secs: until the workers stop.
    """
    rng = np.random.default_rng()
    lock = anyio.Lock()
    server = ParameterServer(
        np.zeros(4), parse_protocol(protocol, num_workers), num_workers=num_workers
    )

    @timed("compute", worker=lambda worker: worker)
    async def compute(worker: int) -> None:
        factor = SLOWER if worker % 4 == 3 else 1.0
        await asyncio.sleep(factor * COMPUTE_SECS * rng.gamma(6.0, 1 / 6.0))

    async def serve() -> None:
        await asyncio.sleep(SERVICE_SECS * rng.uniform(0.7, 1.3))

    served = timed("service")(serve) if is_seen else serve

    async def push() -> None:
        async with lock:
            await served()

    pushed = push if is_seen else timed("push")(push)

    async def work(worker: int) -> None:
        async def step() -> dict[str, float]:
            _, version = server.pull(worker)
            await compute(worker)
            await pushed()
            server.push(worker, np.zeros(4), version)
            return {}

        creator = FunctionSessionCreator(step, global_step=server.global_step)
        await train_for(secs, creator, ProtocolHook(server, worker))

    async with anyio.create_task_group() as group:
        for worker in range(num_workers):
            group.start_soon(work, worker)
