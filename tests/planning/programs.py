"""Programs that are recorded, beside that of `program_of_sleeps.py`."""

from functools import partial
from pathlib import Path

import anyio
import numpy as np

from asynchooks import FunctionSessionCreator
from asynchooks.planning import record, timed
from asynchooks.protocols import ParameterServer, Protocol, ProtocolHook

from ..support.step_loops import run_steps
from . import program_of_sleeps


@timed("compute", worker=lambda number, secs: number)
async def compute(number: int, secs: float) -> None:
    await anyio.sleep(secs)


async def gradients(num_updates: int, protocol: Protocol, *secs: float) -> None:
    """Workers around a parameter server, of which each takes always as long."""
    server = ParameterServer(np.zeros(2), protocol, num_workers=len(secs))

    async def work(number: int) -> None:
        async def step() -> dict[str, float]:
            parameters, version = server.pull(number)
            await compute(number, secs[number])
            server.push(number, parameters, version)
            return {}

        creator = FunctionSessionCreator(step, global_step=server.global_step)
        await run_steps(creator, num_updates, ProtocolHook(server, number))

    async with anyio.create_task_group() as group:
        for number in range(len(secs)):
            group.start_soon(work, number)


def record_until_killed(backend: str, path: Path) -> None:
    with record(path, flush_secs=0.1):
        anyio.run(partial(program_of_sleeps.main, steps=10**9), backend=backend)
