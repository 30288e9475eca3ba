"""Sessions on a Dask cluster."""

from collections.abc import Callable
from typing import Any

import anyio

from asynchooks import MonitoredSession, SessionRunHook, StopAtStepHook
from asynchooks.distributed import DaskCluster

Join = Callable[..., DaskCluster]
QUICK = 0.25
"""Seconds until a scheduler counts as lost.

With 0.3 a process says something each 0.1 s, just when anyio's `wait_all_tasks_blocked` looks on
asyncio, which then waits for minutes.
"""


def step() -> dict[str, float]:
    return {"loss": 0.0}


async def slow_step() -> dict[str, float]:
    await anyio.sleep(0.002)
    return {"loss": 0.0}


def stopping(last_step: int | None) -> list[SessionRunHook]:
    return [] if last_step is None else [StopAtStepHook(last_step=last_step)]


async def train(
    address: str, training: str, last_step: int | None, num_sessions: int, is_slow: bool = False
) -> tuple[int, int]:
    """(Runs that were made here, the step at the end)."""
    num_runs = 0
    async with DaskCluster(address, training) as cluster:

        async def one() -> None:
            nonlocal num_runs
            num_here = await train_here(cluster, last_step, slow_step if is_slow else step)
            num_runs += num_here

        async with anyio.create_task_group() as group:
            for _ in range(num_sessions):
                group.start_soon(one)
        return num_runs, cluster.global_step.value


async def train_here(
    cluster: DaskCluster, last_step: int | None, step: Any = step, *hooks: SessionRunHook
) -> int:
    """One session; returns the number of its runs."""
    num_runs = 0
    creator = cluster.session_creator(step)
    async with MonitoredSession([*stopping(last_step), *hooks], creator) as session:
        while not session.should_stop():
            await session.run("loss")
            num_runs += 1
    return num_runs


async def run_once(creator: Any, fetch: str = "loss", last_step: int | None = None) -> None:
    """One run of a session of its own."""
    async with MonitoredSession(stopping(last_step), creator) as session:
        await session.run(fetch)


def cut(cluster: DaskCluster) -> None:
    """As a network does: both ends see the connection end."""
    stream: Any = cluster._stream
    stream._loop.soon(stream.comm.abort)
