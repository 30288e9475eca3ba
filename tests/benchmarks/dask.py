"""How soon workers in other processes go on, and what an exact stop costs, by a Dask scheduler.

    python -m tests.benchmarks.dask                           # all but the kills
    python -m tests.benchmarks.dask wakes [--waiters 64]      # how soon waiters go on
    python -m tests.benchmarks.dask kills [--kills 50]        # processes that are killed

Three worker processes, the scheduler's and the one that publishes, on loopback. It does not
measure a network, nor what Dask's own tasks cost. What a scheduler carries is estimated by the
processor time that it spends, as if it did nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import distributed

from asynchooks import MonitoredSession, StopAtStepHook
from asynchooks.distributed import DaskCluster

from ..distributed.processes import a_scheduler
from ._dask_kills import kill_many, rows_of
from ._report import percentile, print_table
from ._scheduler_load import scheduler_load

NUM_PROCESSES, NUM_SESSIONS = 3, 4
NUM_WAITERS = {1: 10.0, 8: 10.0, 64: 15.0, 512: 40.0}
"""Waiters in each process → the bar for p99, ms."""
NUM_ROUNDS, NUM_STEPS, NUM_TRIALS = 100, 6000, 7
BEATS_PER_SEC = 1.0
"""Of one process: three in `heartbeat_secs`, which is 3 s unless it is set."""


def wait(
    address: str, loop: str, name: str, num_waiters: int, num_rounds: int
) -> list[list[float]]:
    """When each of the waiters went on, in seconds of the machine's clock, by step."""
    return anyio.run(waiting, address, name, num_waiters, num_rounds, backend=loop)


async def waiting(address: str, name: str, num_waiters: int, num_rounds: int) -> list[list[float]]:
    resumed: list[list[float]] = [[] for _ in range(num_rounds)]
    async with DaskCluster(address, name) as cluster:

        async def wait_for(step: int) -> None:
            await cluster.global_step.wait_for(step)
            resumed[step - 1].append(time.monotonic())

        for step in range(1, num_rounds + 1):
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


async def release_secs(
    client: Any, loop: str, num_waiters: int, num_rounds: int = NUM_ROUNDS
) -> list[float]:
    """Seconds from publishing to each waiter's going on, in an event loop of each worker."""
    name, address = f"release {num_waiters} {loop}", client.scheduler.address
    published: list[float] = []
    found: list[list[list[float]]] = []

    async def collect() -> None:
        found.extend(await everywhere(client, wait, address, loop, name, num_waiters, num_rounds))

    async with DaskCluster(client, name) as cluster, anyio.create_task_group() as group:
        group.start_soon(collect)
        for _ in range(num_rounds):
            while (await cluster.statistics())["num_waiting"] < NUM_PROCESSES:  # noqa: ASYNC110
                await anyio.sleep(0.002)  # the scheduler alone knows
            await anyio.sleep(0.005)  # until they are idle
            published.append(time.monotonic())
            await cluster.advance()
    return [
        resumed - published[place]
        for of_process in found
        for place, all_resumed in enumerate(of_process)
        for resumed in all_resumed
    ]


async def echo_secs() -> list[float]:
    """Seconds for a byte to another process and back, which shows how busy the machine is."""
    program = "import sys\nfor line in sys.stdin: print(flush=True)"
    found = []
    async with await anyio.open_process([sys.executable, "-c", program], stderr=None) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(NUM_ROUNDS):
            await anyio.sleep(0.005)
            begun = time.monotonic()
            await process.stdin.send(b"\n")
            await process.stdout.receive(1)
            found.append(time.monotonic() - begun)
        process.kill()
    return found


async def steps_per_sec(client: Any, name: str, has_limit: bool) -> float:
    spans = await everywhere(client, train, name, has_limit)
    rate: float = NUM_STEPS / (max(end for _, end in spans) - min(begun for begun, _ in spans))
    return rate


def both(secs: list[float]) -> str:
    return f"{percentile(secs, 50) * 1e3:.1f} / {percentile(secs, 99) * 1e3:.1f}"


def a_cluster() -> Any:
    return distributed.LocalCluster(
        n_workers=NUM_PROCESSES, threads_per_worker=1, host="127.0.0.1",
        dashboard_address="127.0.0.1:0", asynchronous=True,
    )  # fmt: skip


async def wake_rows(client: Any, num_waiters: int, num_rounds: int = NUM_ROUNDS) -> list[list[str]]:
    rows = []
    for loop in ("asyncio", "trio"):
        secs = await release_secs(client, loop, num_waiters, num_rounds)
        bar = NUM_WAITERS.get(num_waiters)
        what = f"{num_waiters} waiters, {loop}: p50 / p99 ms"
        rows.append([what, "-" if bar is None else f"p99 <= {bar:g}", both(secs)])
    return rows


async def measure_wakes(num_waiters: int, num_rounds: int) -> None:
    async with a_cluster() as cluster, distributed.Client(cluster, asynchronous=True) as client:
        rows = [["a byte to a process and back: p50 / p99 ms", "-", both(await echo_secs())]]
        rows += await wake_rows(client, num_waiters, num_rounds)
    print_table(f"Waiters in {NUM_PROCESSES} processes", ["", "bar", ""], rows)


async def measure_kills(num_kills: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rounds = await kill_many(num_kills, Path(directory))
    title = f"{NUM_PROCESSES} processes of {NUM_SESSIONS} sessions, one of which is killed"
    print_table(title, ["", "bar", ""], rows_of(rounds))


async def measure() -> None:
    async with a_cluster() as cluster, distributed.Client(cluster, asynchronous=True) as client:
        rows = [["a byte to a process and back: p50 / p99 ms", "-", both(await echo_secs())]]
        for num_waiters in NUM_WAITERS:
            rows += await wake_rows(client, num_waiters)
        rates: dict[bool, list[float]] = {False: [], True: []}
        for trial in range(NUM_TRIALS):  # in turns, so that both meet the same machine
            for has_limit, found in rates.items():
                name = f"train {trial} {has_limit}"
                found.append(await steps_per_sec(client, name, has_limit))
        free, exact = (statistics.median(each) for each in rates.values())
        ratio = statistics.median(a / b for a, b in zip(rates[True], rates[False], strict=True))
        rows.append([f"{NUM_SESSIONS} sessions each: steps/s without a limit", "-", f"{free:.0f}"])
        rows.append(["the same, with an exact stop", "-", f"{exact:.0f}"])
        rows.append(["ratio", "-", f"{ratio:.2f}"])
        with a_scheduler() as scheduler:  # alone in its process
            load = await scheduler_load(scheduler)
        rows.append(["scheduler's time for one advance, µs", "-", f"{load.advance_secs * 1e6:.0f}"])
        rows.append(["so it carries advances/s", "-", f"{1 / load.advance_secs:.0f}"])
        rows.append(["to notify one process of a step, µs", "-", f"{load.news_secs * 1e6:.0f}"])
        beats = BEATS_PER_SEC * load.advance_secs
        rows.append(["processes whose heartbeats take a tenth of it", "-", f"{0.1 / beats:.0f}"])
        print_table(f"A Dask scheduler and {NUM_PROCESSES} processes", ["", "bar", ""], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=["all", "wakes", "kills"], default="all")
    parser.add_argument("--waiters", type=int, default=64, help="in each process")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="steps that are waited for")
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    if options.what == "wakes":
        anyio.run(measure_wakes, options.waiters, options.rounds)
    elif options.what == "kills":
        anyio.run(measure_kills, options.kills)
    else:
        anyio.run(measure)
