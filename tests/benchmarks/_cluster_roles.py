"""What one process of a cluster does while it is measured: it trains, waits or publishes.

`ClusterProcess` starts the process, and asks it through a pipe. It judges nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import anyio
import tensorflow as tf

from asynchooks import ClusterTask, MonitoredSession

# private: what it costs to notify others is a part of each run, which no public name has alone
from asynchooks.tf.cluster._table import StepTable

from ._cluster_training import creator, final_step, model, train, until_asked
from ._report import run_on

v1 = tf.compat.v1

PAUSE_SECS = 0.03
"""Between asking for a step and having it published: the waiters are idle by then."""
WARM_UP = 10


async def publishing(
    pipe: Connection, task: ClusterTask, name: str, num_rounds: int
) -> list[float]:
    graph, _, train_op = model(task, name)
    with graph.as_default():
        session = MonitoredSession([], creator(task))
    begun: list[float] = []
    async with session:
        pipe.send("open")
        for _ in range(num_rounds):
            await until_asked(pipe)
            begun.append(time.monotonic())
            await session.run(train_op)
        await until_asked(pipe)  # the waiters need a worker that might train
    return begun


def publish(pipe: Connection, task: ClusterTask, name: str, loop: str, num_rounds: int) -> None:
    """Answer "open"; publish whenever asked to; at the end answer when each run began."""
    pipe.send(run_on(loop, publishing, pipe, task, name, num_rounds))


async def waiting(
    pipe: Connection, task: ClusterTask, name: str, num_waiters: int, num_rounds: int
) -> list[list[float]]:
    graph, _, _ = model(task, name)
    with graph.as_default():
        session = MonitoredSession([], creator(task, heartbeat_secs=1000.0))
    resumed: list[list[float]] = [[] for _ in range(num_rounds)]
    async with session:

        async def wait_for(number: int) -> None:
            await session.global_step.wait_for(number)
            resumed[number - 1].append(time.monotonic())

        for number in range(1, num_rounds + 1):
            async with anyio.create_task_group() as group:
                for _ in range(num_waiters):
                    group.start_soon(wait_for, number)
                await anyio.sleep(PAUSE_SECS)  # until the ps knows which processes to notify
                pipe.send("waiting")
    return resumed


def wait(
    pipe: Connection, task: ClusterTask, name: str, loop: str, num_waiters: int, num_rounds: int
) -> None:
    """Answer "waiting" before each step, then when each waiter resumed, by step."""
    pipe.send(run_on(loop, waiting, pipe, task, name, num_waiters, num_rounds))


def notifications(pipe: Connection, task: ClusterTask, sizes: list[int], num_runs: int) -> None:
    """Answer the median ms of a run by the tasks it may notify: none or some, due or not."""
    found: dict[str, list[float]] = {}
    runs: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:

        def measure(suffix: str) -> None:
            for turn in range(num_runs + WARM_UP):  # in turns, so that all meet the same machine
                for name, run in runs.items():
                    begun = time.perf_counter()
                    run()
                    if turn >= WARM_UP:
                        found.setdefault(name + suffix, []).append(time.perf_counter() - begun)

        arm: list[Callable[[], Any]] = []
        for size in [0, *sizes]:
            graph, step, train_op = model(task, f"notifications{size}")
            table = StepTable(step, size, None)
            news = table.news_after(train_op)
            with graph.as_default():
                init = v1.global_variables_initializer()
            session = stack.enter_context(v1.Session(task.target, graph=graph, config=task.config))
            session.run(init)
            session.run(table.begin_epoch, {table.known_epoch: 0})
            if size:
                runs[f"{size} tasks"] = session.make_callable(news)
                # the first task waits for a step that has come
                request = {table.request: [0, -1, 1, 0, 0, 0, 1, 0]}
                arm.append(partial(session.run, table.exchange, request))
            else:
                runs["a bare step"] = session.make_callable(train_op)
        measure("")
        for each in arm:
            each()
        measure(", one due")
    pipe.send({name: statistics.median(each) * 1e3 for name, each in found.items()})


ROLES = {each.__name__: each for each in (train, final_step, publish, wait, notifications)}


def play(pipe: Connection, cluster: dict[str, list[str]], job: str, index: int, size: int) -> None:
    """What the process does: the roles that it is asked for, until it is killed."""
    v1.logging.set_verbosity(v1.logging.ERROR)
    task = ClusterTask(cluster, job, index, workers_per_process=size)
    task.start()
    pipe.send("up")
    while True:
        role, options = pipe.recv()
        ROLES[role](pipe, task, **options)
