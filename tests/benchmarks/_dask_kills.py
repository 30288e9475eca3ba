"""Processes that train through a Dask scheduler are killed: what becomes of the count of steps.

In each round three processes begin to train together, and one of them is killed meanwhile. A
killed process cannot say what was counted of its runs, but its step function has written a byte
for each run before that.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import anyio
import psutil

from asynchooks import MonitoredSession, StopAtStepHook
from asynchooks.distributed import DaskCluster

from ..distributed.processes import Scheduler, a_pool, a_scheduler, elsewhere, gathered

NUM_SESSIONS, LAST_STEP = 4, 400


class Round(NamedTuple):
    """What one kill came to; all counts in runs."""

    is_inexact: bool
    """Whether the scheduler's step or that of a process did not end at the last step."""
    num_lost: int
    """Counted steps without a run, or runs of the processes that live that were not counted."""
    num_under_way: int
    """Runs that the killed process had made, of which nothing was counted: at most one a session"""
    num_orphans: int
    """Processes, credits and waits that the scheduler still keeps at the end, of the killed one."""
    secs: float
    """From the kill to the end of training."""


def sizes_of(paths: list[str]) -> list[int]:
    return [os.path.getsize(path) for path in paths]


async def until_waiting(cluster: DaskCluster, num_processes: int) -> None:
    while (await cluster.statistics())["num_waiting"] < num_processes:  # noqa: ASYNC110
        await anyio.sleep(0.002)  # the scheduler alone knows


async def training(address: str, name: str, path: str) -> int:
    """Train up to the last step; returns the number of runs of this process."""
    num_runs = 0
    with FileIO(path, "ab") as made:

        async def step() -> dict[str, float]:
            await anyio.sleep(0.002)
            made.write(b".")
            return {"loss": 0.0}

        async with DaskCluster(address, name) as cluster:
            await cluster.global_step.wait_for(1)  # when all are here

            async def work() -> None:
                nonlocal num_runs
                hooks = [StopAtStepHook(last_step=LAST_STEP)]
                async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
                    while not session.should_stop():
                        await session.run("loss")
                        num_runs += 1

            async with anyio.create_task_group() as group:
                for _ in range(NUM_SESSIONS):
                    group.start_soon(work)
            assert cluster.global_step.value == LAST_STEP, cluster
    return num_runs


def train_until_killed(address: str, name: str, path: str) -> None:
    anyio.run(training, address, name, path)


async def one_round(
    scheduler: Scheduler, pool: ProcessPoolExecutor, name: str, directory: Path, kill_at: int
) -> Round:
    paths = [str(directory / f"{name}-{process}") for process in range(3)]
    args = scheduler.address, name
    context = multiprocessing.get_context("spawn")
    victim = context.Process(target=train_until_killed, args=(*args, paths[2]), daemon=True)
    num_runs, killed_at = 0, 0.0

    async def survive() -> None:
        nonlocal num_runs
        calls = [elsewhere(pool, "asyncio", training, *args, path) for path in paths[:2]]
        num_runs = sum(await gathered(*calls))

    async with DaskCluster(scheduler.address, name) as cluster:
        victim.start()
        async with anyio.create_task_group() as group:
            group.start_soon(survive)
            await until_waiting(cluster, 3)
            await cluster.advance()
            await cluster.global_step.wait_for(kill_at)
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            killed_at = time.monotonic()
        secs = time.monotonic() - killed_at
        victim.join()
        step = await cluster.advance(0)
        statistics = await cluster.statistics()
        await cluster.forget()
    *of_others, of_victim = sizes_of(paths)
    counted = LAST_STEP - 1 - num_runs  # of the victim's runs
    lost = sum(of_others) - num_runs + max(0, counted - of_victim)
    left = statistics["num_processes"] - 1 + statistics["num_held"] + statistics["num_waiting"]
    return Round(step != LAST_STEP, lost, max(0, of_victim - counted), left, secs)


def num_children() -> int:
    """All but the one that Python itself keeps for multiprocessing."""
    children = psutil.Process().children(recursive=True)
    return sum("resource_tracker" not in " ".join(each.cmdline()) for each in children)


async def kill_rows(num_kills: int) -> list[list[str]]:
    """One round after the other, at a random step each; the seed is fixed."""
    chance, rounds = random.Random(0), list[Round]()
    with tempfile.TemporaryDirectory() as folder, a_scheduler() as scheduler, a_pool(2) as pool:
        for number in range(num_kills):
            kill_at = chance.randrange(2, LAST_STEP - 50)
            name = f"kill {number}"
            rounds.append(await one_round(scheduler, pool, name, Path(folder), kill_at))
    inexact, lost, under_way, orphans, secs = zip(*rounds, strict=True)
    found: dict[str, float] = {
        "kills": num_kills,
        "rounds that did not end at the last step": sum(inexact),
        "runs lost, or counted twice": sum(lost),
        "runs under way when killed, most": max(under_way),
        "processes, credits and waits kept": sum(orphans),
        "processes left on this machine": num_children(),
        "from the kill to the end of training, most: s": max(secs),
    }
    return [[what, f"{value:.3g}"] for what, value in found.items()]
