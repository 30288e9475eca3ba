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

NUM_SESSIONS = 4
LAST_STEP = 400


class Round(NamedTuple):
    """What one kill came to; all counts in runs."""

    is_exact: bool
    """Whether the scheduler's step and that of each process ended at the last step."""
    num_lost: int
    """Counted steps without a run, or runs of the processes that live that were not counted."""
    num_under_way: int
    """Runs that the killed process had made, of which nothing was counted: at most one a session"""
    num_orphans: int
    """Processes, credits and waits that the scheduler still keeps at the end, of the killed one."""
    secs: float
    """From the kill to the end of training."""


def bytes_of(path: str) -> FileIO:
    return FileIO(path, "ab")


def sizes_of(paths: list[str]) -> list[int]:
    return [os.path.getsize(path) for path in paths]


async def training(address: str, name: str, path: str) -> list[int]:
    """Train up to the last step; returns the step after each run of this process."""
    steps: list[int] = []
    with bytes_of(path) as made:

        async def step() -> dict[str, float]:
            await anyio.sleep(0.002)
            made.write(b".")
            return {"loss": 0.0}

        async with DaskCluster(address, name) as cluster:
            await cluster.global_step.wait_for(1)  # when all are here

            async def work() -> None:
                hooks = [StopAtStepHook(last_step=LAST_STEP)]
                async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
                    while not session.should_stop():
                        await session.run("loss")
                        steps.append(session.global_step.value)

            async with anyio.create_task_group() as group:
                for _ in range(NUM_SESSIONS):
                    group.start_soon(work)
            assert cluster.global_step.value == LAST_STEP, cluster
    return steps


def train_until_killed(address: str, name: str, path: str) -> None:
    anyio.run(training, address, name, path)


async def one_round(
    scheduler: Scheduler, pool: ProcessPoolExecutor, name: str, directory: Path, kill_at: int
) -> Round:
    paths = [str(directory / f"{name}-{process}") for process in range(3)]
    args = scheduler.address, name
    context = multiprocessing.get_context("spawn")
    victim = context.Process(target=train_until_killed, args=(*args, paths[2]), daemon=True)
    killed_at = 0.0
    found: list[list[int]] = []

    async def survive() -> None:
        calls = [elsewhere(pool, "asyncio", training, *args, path) for path in paths[:2]]
        found.extend(await gathered(*calls))

    async with DaskCluster(scheduler.address, name) as cluster:
        victim.start()
        async with anyio.create_task_group() as group:
            group.start_soon(survive)
            while (await cluster.statistics())["num_waiting"] < 3:  # noqa: ASYNC110
                await anyio.sleep(0.005)
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
    num_made = sizes_of(paths)
    num_runs = sum(map(len, found))
    of_victim = LAST_STEP - 1 - num_runs  # what was counted of its runs
    lost = sum(num_made[:2]) - num_runs + max(0, of_victim - num_made[2])
    left = (statistics["num_processes"] - 1, statistics["num_held"], statistics["num_waiting"])
    return Round(step == LAST_STEP, lost, max(0, num_made[2] - of_victim), sum(left), secs)


def num_children() -> int:
    """All but the one that Python itself keeps for multiprocessing."""
    children = psutil.Process().children(recursive=True)
    return sum("resource_tracker" not in " ".join(each.cmdline()) for each in children)


async def kill_many(num_kills: int, directory: Path) -> list[Round]:
    """One round after the other, at a random step each; the seed is fixed."""
    chance = random.Random(0)
    with a_scheduler() as scheduler, a_pool(2) as pool:
        rounds = []
        for number in range(num_kills):
            kill_at = chance.randrange(2, LAST_STEP - 50)
            rounds.append(await one_round(scheduler, pool, f"kill {number}", directory, kill_at))
    return rounds


def rows_of(rounds: list[Round]) -> list[list[str]]:
    """For the table: what was measured, the bar, and the figure."""
    most_under_way = max(each.num_under_way for each in rounds)
    found: list[tuple[str, str, float]] = [
        ("kills", "-", len(rounds)),
        (
            "rounds that did not end at the last step",
            "0",
            sum(not each.is_exact for each in rounds),
        ),
        ("runs lost, or counted twice", "0", sum(each.num_lost for each in rounds)),
        ("runs under way when killed, most", f"<= {NUM_SESSIONS}", most_under_way),
        ("processes, credits and waits kept", "0", sum(each.num_orphans for each in rounds)),
        ("processes left on this machine", "0", num_children()),
        ("from the kill to the end of training, most: s", "-", max(each.secs for each in rounds)),
    ]
    return [[what, bar, f"{value:.3g}"] for what, bar, value in found]
