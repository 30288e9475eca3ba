"""How soon workers in other processes go on, and what an exact stop costs, by a Dask scheduler.

    python -m tests.benchmarks.dask                           # all but the kills
    python -m tests.benchmarks.dask kills [--kills 50]        # processes that are killed

Three worker processes, the scheduler's and the one that publishes, on loopback. It does not
measure a network, nor what Dask's own tasks cost. What a scheduler carries is estimated by the
processor time that it spends, as if it did nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.lowlevel
import distributed
import psutil

from asynchooks import MonitoredSession, StopAtStepHook
from asynchooks.distributed import DaskCluster

from ..distributed.processes import Scheduler, a_scheduler
from ._dask_kills import kill_rows, until_waiting
from ._report import echo_ms, p50_and_p99, print_table

NUM_PROCESSES, NUM_SESSIONS = 3, 4
NUM_ROUNDS, NUM_STEPS, NUM_TRIALS = 100, 6000, 7
NUM_CONNECTIONS, NUM_ADVANCES = 64, 40


def wait(address: str, loop: str, name: str, num_waiters: int) -> list[list[float]]:
    """When each of the waiters went on, in seconds of the machine's clock, by step."""
    return anyio.run(waiting, address, name, num_waiters, backend=loop)


async def waiting(address: str, name: str, num_waiters: int) -> list[list[float]]:
    resumed: list[list[float]] = [[] for _ in range(NUM_ROUNDS)]
    async with DaskCluster(address, name) as cluster:

        async def wait_for(step: int) -> None:
            await cluster.global_step.wait_for(step)
            resumed[step - 1].append(time.monotonic())

        for step in range(1, NUM_ROUNDS + 1):
            async with anyio.create_task_group() as group:
                for _ in range(num_waiters):
                    group.start_soon(wait_for, step)
    return resumed


async def train(name: str, has_limit: bool) -> tuple[float, float]:
    """(begin, end) of a share of the steps, in seconds of the machine's clock."""
    async with DaskCluster(distributed.get_worker().scheduler.address, name) as cluster:
        creator = cluster.session_creator(lambda: {"loss": 0.0})
        hooks = [StopAtStepHook(last_step=NUM_STEPS)] if has_limit else []
        await cluster.advance(0)
        begun = time.monotonic()

        async def run() -> None:
            async with MonitoredSession(hooks, creator) as session:
                # without a limit each makes its share, and looks for an end all the same
                num_runs = 0
                while not session.should_stop() and (
                    has_limit or num_runs < NUM_STEPS // NUM_PROCESSES // NUM_SESSIONS
                ):
                    await session.run("loss")
                    num_runs += 1

        async with anyio.create_task_group() as group:
            for _ in range(NUM_SESSIONS):
                group.start_soon(run)
        return begun, time.monotonic()


async def everywhere(client: Any, fn: Callable[..., Any], *args: Any) -> list[Any]:
    workers = list(await client.nthreads())
    assert len(workers) == NUM_PROCESSES, workers
    tasks = [client.submit(fn, *args, workers=[each], pure=False) for each in workers]
    return list(await client.gather(tasks))


async def release_secs(client: Any, loop: str, num_waiters: int) -> list[float]:
    """Seconds from publishing to each waiter's going on, in an event loop of each worker."""
    name, address = f"release {num_waiters} {loop}", client.scheduler.address
    published: list[float] = []
    found: list[list[list[float]]] = []

    async def collect() -> None:
        found.extend(await everywhere(client, wait, address, loop, name, num_waiters))

    async with DaskCluster(client, name) as cluster, anyio.create_task_group() as group:
        group.start_soon(collect)
        for _ in range(NUM_ROUNDS):
            await until_waiting(cluster, NUM_PROCESSES)
            await anyio.sleep(0.005)  # until they are idle
            published.append(time.monotonic())
            await cluster.advance()
    return [
        resumed - published[place]
        for of_process in found
        for place, all_resumed in enumerate(of_process)
        for resumed in all_resumed
    ]


async def steps_per_sec(client: Any, name: str, has_limit: bool) -> float:
    spans = await everywhere(client, train, name, has_limit)
    rate: float = NUM_STEPS / (max(end for _, end in spans) - min(begun for begun, _ in spans))
    return rate


def a_client(address: Any, stack: AsyncExitStack) -> Any:
    client = distributed.Client(address, asynchronous=True, set_as_default=False)
    return stack.enter_async_context(client)


async def scheduler_secs(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds of the scheduler's processor: for a request that moves the step, and a notification.

    Its own time, so that it hardly matters what else the machine does. All processes that it
    serves are connections of this one, which does not get in its way. A heartbeat costs as much as
    a request; the notification comes with the next request of a process.
    """
    process = psutil.Process(scheduler.pid)

    def spent() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    async def advance(cluster: DaskCluster) -> None:
        for _ in range(NUM_ADVANCES):
            await cluster.advance()

    async with AsyncExitStack() as stack:
        client = await a_client(scheduler.address, stack)
        clusters = [
            await stack.enter_async_context(
                DaskCluster(client, "load", heartbeat_secs=1e4, lease_secs=1e4)
            )
            for _ in range(NUM_CONNECTIONS)
        ]
        before = spent()
        async with anyio.create_task_group() as group:
            for each in clusters:
                group.start_soon(advance, each)
        advance_secs = (spent() - before) / (NUM_CONNECTIONS * NUM_ADVANCES)

        first, *others = clusters
        begin = await first.advance(0)  # the true one
        before = spent()
        for step in range(begin + 1, begin + NUM_ADVANCES + 1):
            async with anyio.create_task_group() as group:
                for each in others:
                    group.start_soon(each.global_step.wait_for, step)
                await anyio.lowlevel.checkpoint()
                group.start_soon(first.advance)
        return advance_secs, (spent() - before) / NUM_ADVANCES / len(others)


async def wake_rows(client: Any) -> list[list[str]]:
    return [
        [
            f"{num_waiters} waiters, {loop}: p50 / p99 ms",
            p50_and_p99(await release_secs(client, loop, num_waiters)),
        ]
        for num_waiters in (1, 8, 64, 512)  # in each process
        for loop in ("asyncio", "trio")
    ]  # fmt: skip


async def rate_rows(client: Any) -> list[list[str]]:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for trial in range(NUM_TRIALS):  # in turns, so that both meet the same machine
        for has_limit, found in rates.items():
            found.append(await steps_per_sec(client, f"train {trial} {has_limit}", has_limit))
    free, exact = (statistics.median(each) for each in rates.values())
    ratio = statistics.median(a / b for a, b in zip(rates[True], rates[False], strict=True))
    with a_scheduler() as scheduler:  # alone in its process
        advance_secs, news_secs = await scheduler_secs(scheduler)
    figures = {
        f"{NUM_SESSIONS} sessions each: steps/s without a limit": free,
        "the same, with an exact stop": exact,
        "ratio": ratio,
        "scheduler's time for one advance, µs": advance_secs * 1e6,
        "to notify one process of a step, µs": news_secs * 1e6,
        "processes with a heartbeat a second that take a tenth of it": 0.1 / advance_secs,
    }
    return [[what, f"{figure:.5g}"] for what, figure in figures.items()]


async def main(num_kills: int) -> None:
    if num_kills:
        rows = await kill_rows(num_kills)
    else:
        rows = [["a byte to a process and back: p50 / p99 ms", echo_ms()]]
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(
                distributed.LocalCluster(
                    n_workers=NUM_PROCESSES, threads_per_worker=1, host="127.0.0.1",
                    dashboard_address="127.0.0.1:0", asynchronous=True,
                )
            )  # fmt: skip
            client = await a_client(cluster, stack)
            rows += [*await wake_rows(client), *await rate_rows(client)]
    print_table(f"A Dask scheduler and {NUM_PROCESSES} processes", ["", ""], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=["kills"])
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    anyio.run(main, options.kills if options.what else 0)
