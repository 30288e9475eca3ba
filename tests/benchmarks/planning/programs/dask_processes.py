"""Processes on Dask around a parameter server on a worker of its own."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asynchooks import FunctionSessionCreator, MonitoredSession
from asynchooks.planning import PlannedParameterServer, record, timed
from asynchooks.protocols import ProtocolHook, parse_protocol

COMPUTE_SECS, UPDATE_SECS = 0.15, 0.003


@timed("compute", worker=lambda worker, rng: worker)
async def compute(worker: int, rng: np.random.Generator) -> None:
    await asyncio.sleep(COMPUTE_SECS * rng.gamma(6.0, 1 / 6.0))


async def train(server: Any, workers: range, secs: float) -> None:
    """These workers, each with a session; the server is a remote one, or stands for it."""
    rng = np.random.default_rng()
    began = time.monotonic()

    async def work(worker: int) -> None:
        async def step() -> dict[str, float]:
            _, version = await server.pull(worker)
            await compute(worker, rng)
            await server.push(worker, np.zeros(64), version)
            return {}

        creator = FunctionSessionCreator(step, global_step=server.global_step)
        async with MonitoredSession([ProtocolHook(server, worker)], creator) as session:
            while time.monotonic() - began < secs:
                await session.run([])

    async with anyio.create_task_group() as group:
        for worker in workers:
            group.start_soon(work, worker)


async def main(
    num_processes: int = 3, per_process: int = 4, protocol: str = "async", secs: float = 20.0
) -> None:
    """What a plan runs in place of `main_on_dask`: all workers in one process."""
    num_workers = num_processes * per_process
    async with PlannedParameterServer(
        np.zeros(64), parse_protocol(protocol, num_workers), num_workers=num_workers
    ) as server:
        await train(server, range(num_workers), secs)


def update(parameters: Any, gradient: Any, rate: float) -> Any:
    """Takes some milliseconds of the processor, as one of a real model does."""
    until = time.thread_time() + UPDATE_SECS * np.random.uniform(0.7, 1.3)
    while time.thread_time() < until:
        pass
    return parameters - rate * gradient


async def train_here(
    address: Any, workers: range, secs: float, path: str, settings: dict[str, Any]
) -> None:
    """On a worker of Dask."""
    from asynchooks.distributed import RemoteParameterServer

    async with RemoteParameterServer(address) as server, record(path, settings=settings):
        await train(server, workers, secs)


async def main_on_dask(
    path: Path, num_processes: int = 3, per_process: int = 4, protocol: str = "async",
    secs: float = 20.0,
) -> None:  # fmt: skip
    """Train really, and record each process and the server into the directory `path`."""
    from distributed import Client, LocalCluster

    from asynchooks.distributed import host_parameter_server

    settings = {
        "num_processes": num_processes, "per_process": per_process, "protocol": protocol,
        "secs": secs,
    }  # fmt: skip
    num_workers = num_processes * per_process
    async with (
        LocalCluster(
            n_workers=num_processes + 1, threads_per_worker=1, asynchronous=True,
            dashboard_address="127.0.0.1:0", host="127.0.0.1",
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):  # fmt: skip
        await client.wait_for_workers(num_processes + 1, timeout=60)
        host, *places = sorted(cluster.scheduler_info["workers"])
        async with host_parameter_server(
            client, np.zeros(64), parse_protocol(protocol, num_workers), num_workers=num_workers,
            update=update, worker=host, trace=os.fspath(path / "server.pftrace"),
        ) as server:  # fmt: skip
            parts = [
                client.submit(
                    train_here, server.address,
                    range(number * per_process, (number + 1) * per_process), secs,
                    os.fspath(path / f"{number}.pftrace"), settings,
                    workers=[place], pure=False,
                )
                for number, place in enumerate(places)
            ]  # fmt: skip
            await client.gather(parts)
