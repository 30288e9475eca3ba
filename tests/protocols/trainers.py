"""A worker's step function, and its session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    StopAtStepHook,
)
from asynchooks.protocols import (
    ParameterServer,
    ProtocolHook,
)

Step = Callable[[], Awaitable[dict[str, Any]]]


def step_of(server: ParameterServer, worker: int, wait: Callable[[], Awaitable[Any]]) -> Step:
    async def step() -> dict[str, Any]:
        parameters, version = server.pull(worker)
        is_done, _ = await server.compute(version, wait)
        if is_done:
            server.push(worker, 2.0 * parameters, version)
        return {"loss": float(np.sum(parameters**2)), "global_step": server.version}

    return step


async def train(
    server: ParameterServer,
    worker: int,
    wait: Callable[[], Awaitable[Any]],
    last_step: int,
    *hooks: Any,
) -> int:
    """One worker with a session of its own; returns its number of runs."""
    num_runs = 0
    creator = FunctionSessionCreator(step_of(server, worker, wait), global_step=server.global_step)
    all_hooks = [ProtocolHook(server, worker), StopAtStepHook(last_step=last_step), *hooks]
    async with MonitoredSession(all_hooks, creator) as session:
        while not session.should_stop():
            await session.run("loss")
            num_runs += 1
    return num_runs
