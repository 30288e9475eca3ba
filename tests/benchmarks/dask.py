"""How soon workers in other processes go on, and what an exact stop costs, by a Dask scheduler.

    python -m tests.benchmarks.dask

Three processes, the scheduler's and the one that publishes, on loopback. It does not measure a
network, nor Dask's own tasks. What a scheduler carries is estimated by the processor time that it
spends, as if it did nothing else.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import anyio
import psutil

from asynchooks import MonitoredSession, StopAtStepHook
from asynchooks.distributed import DaskCluster

from ..distributed.processes import Scheduler, a_pool, a_scheduler, elsewhere, gathered
from ._report import p50_and_p99, print_table

NUM_PROCESSES, NUM_SESSIONS = 3, 4
NUM_ROUNDS, NUM_STEPS, NUM_TRIALS = 100, 6000, 7
NUM_CONNECTIONS, NUM_ADVANCES = 64, 40


async def until_waiting(cluster: DaskCluster) -> None:
    while (await cluster.statistics())["num_waiting"] < NUM_PROCESSES:  # noqa: ASYNC110
        await anyio.sleep(0.002)  # the scheduler alone knows


async def everywhere(
    pool: ProcessPoolExecutor, loop: str, fn: Callable[..., Any], *args: Any
) -> list[Any]:
    return await gathered(*(elsewhere(pool, loop, fn, *args) for _ in range(NUM_PROCESSES)))


async def waiting(address: str, name: str, num_waiters: int) -> list[list[float]]:
    """When each of the waiters went on, in seconds of the machine's clock, by step."""
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


async def release_secs(
    address: str, pool: ProcessPoolExecutor, loop: str, num_waiters: int
) -> list[float]:
    """Seconds from publishing to each waiter's going on, in an event loop of each process."""
    name, published, found = f"release {num_waiters} {loop}", list[float](), list[Any]()

    async def collect() -> None:
        found.extend(await everywhere(pool, loop, waiting, address, name, num_waiters))

    async with DaskCluster(address, name) as cluster, anyio.create_task_group() as group:
        group.start_soon(collect)
        for _ in range(NUM_ROUNDS):
            await until_waiting(cluster)
            await anyio.sleep(0.005)  # until they are idle
            published.append(time.monotonic())
            await cluster.advance()
    return [
        resumed - begun
        for of_process in found
        for begun, all_resumed in zip(published, of_process, strict=True)
        for resumed in all_resumed
    ]


async def train(address: str, name: str, has_limit: bool) -> tuple[float, float]:
    """(begin, end) of a share of the steps, in seconds of the machine's clock."""
    async with DaskCluster(address, name) as cluster:
        creator = cluster.session_creator(lambda: {"loss": 0.0})
        hooks = [StopAtStepHook(last_step=NUM_STEPS)] if has_limit else []
        await cluster.advance(0)
        begun = time.monotonic()

        async def run() -> None:
            async with MonitoredSession(hooks, creator) as session:
                # without a limit each makes its share, and looks for an end all the same
                num_left = NUM_STEPS if has_limit else NUM_STEPS // NUM_PROCESSES // NUM_SESSIONS
                while not session.should_stop() and num_left:
                    await session.run("loss")
                    num_left -= 1

        async with anyio.create_task_group() as group:
            for _ in range(NUM_SESSIONS):
                group.start_soon(run)
        return begun, time.monotonic()


async def steps_per_sec(address: str, pool: ProcessPoolExecutor, *args: Any) -> float:
    begun, ended = zip(*await everywhere(pool, "asyncio", train, address, *args), strict=True)
    return float(NUM_STEPS / (max(ended) - min(begun)))


async def scheduler_secs(scheduler: Scheduler) -> float:
    """Seconds of the scheduler's processor for a request that moves the step.

    Its own time, so that it hardly matters what else the machine does. All processes that it
    serves are connections of this one, which does not get in its way. A heartbeat costs as much.
    """
    times = psutil.Process(scheduler.pid).cpu_times

    async def advance(cluster: DaskCluster) -> None:
        for _ in range(NUM_ADVANCES):
            await cluster.advance()

    async with AsyncExitStack() as stack:
        options = {"heartbeat_secs": 1e4, "lease_secs": 1e4}
        clusters = [
            await stack.enter_async_context(DaskCluster(scheduler.address, "load", **options))
            for _ in range(NUM_CONNECTIONS)
        ]
        before = sum(times()[:2])
        async with anyio.create_task_group() as group:
            for each in clusters:
                group.start_soon(advance, each)
        return float(sum(times()[:2]) - before) / (NUM_CONNECTIONS * NUM_ADVANCES)


async def rows_of_rates(address: str, pool: ProcessPoolExecutor) -> list[list[str]]:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for trial in range(NUM_TRIALS):  # in turns, so that both meet the same machine
        for has_limit, found in rates.items():
            name = f"train {trial} {has_limit}"
            found.append(await steps_per_sec(address, pool, name, has_limit))
    free, exact = rates.values()
    with a_scheduler() as scheduler:  # which has done nothing yet
        advance_secs = await scheduler_secs(scheduler)
    figures = {
        f"{NUM_SESSIONS} sessions each: steps/s without a limit": statistics.median(free),
        "the same, with an exact stop": statistics.median(exact),
        "ratio": statistics.median(a / b for a, b in zip(exact, free, strict=True)),
        "scheduler's time for one advance, µs": advance_secs * 1e6,
        "processes with a heartbeat a second that take a tenth of it": 0.1 / advance_secs,
    }
    return [[what, f"{figure:.5g}"] for what, figure in figures.items()]


async def main() -> None:
    with a_scheduler() as scheduler, a_pool(NUM_PROCESSES) as pool:
        rows = [
            [
                f"{num} waiters in each, {loop}: p50 / p99 ms",
                p50_and_p99(await release_secs(scheduler.address, pool, loop, num)),
            ]
            for num in (1, 8, 64, 512)
            for loop in ("asyncio", "trio")
        ]  # fmt: skip
        rows += await rows_of_rates(scheduler.address, pool)
    print_table(f"A Dask scheduler and {NUM_PROCESSES} processes", ["", ""], rows)


if __name__ == "__main__":
    anyio.run(main)
