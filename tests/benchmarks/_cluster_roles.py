"""What one process of a cluster does while it is measured: it trains, waits or publishes.

`ClusterProcess` starts the process, and asks it through a pipe. It judges nothing.
"""

from __future__ import annotations

import os
import socket
import stat
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import anyio
import anyio.to_thread
import tensorflow as tf

from asynchooks import ClusterTask, MonitoredSession
from asynchooks.tf.cluster._table import StepTable

from ._cluster_model import creator, model, until_asked
from ._cluster_training import final_step, train
from ._report import run_on

v1 = tf.compat.v1

PAUSE_SECS = 0.03
"""Between asking for a step and having it published: the waiters are idle by then."""
WARM_UP = 10


# Waiting, and what lets the waiters go on.


async def publishing(
    pipe: Connection, task: ClusterTask, name: str, num_rounds: int
) -> list[float]:
    graph, _, train_op = model(task, name, is_dense=False)
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
    pipe: Connection,
    task: ClusterTask,
    name: str,
    num_waiters: int,
    num_rounds: int,
    idle: tuple[float, float],
) -> dict[str, Any]:
    idle_secs, heartbeat_secs = idle
    graph, _, _ = model(task, name, is_dense=False)
    with graph.as_default():
        session = MonitoredSession([], creator(task, heartbeat_secs=heartbeat_secs))
    resumed: list[list[float]] = [[] for _ in range(num_rounds)]
    sent = (0, 0)

    async with session:
        step = session.global_step

        async def wait_for(number: int) -> None:
            await step.wait_for(number)
            resumed[number - 1].append(time.monotonic())

        for number in range(1, num_rounds + 1):
            async with anyio.create_task_group() as group:
                for _ in range(num_waiters):
                    group.start_soon(wait_for, number)
                if number == num_rounds:
                    await anyio.sleep(0.5)  # whatever asking has left to do
                    before = bytes_to(task)
                    await anyio.sleep(idle_secs)
                    after = bytes_to(task)
                    sent = after[0] - before[0], after[1] - before[1]
                await anyio.sleep(PAUSE_SECS)  # until the ps knows which processes to notify
                pipe.send("waiting")
    return {"resumed": resumed, "sent": sent}


def wait(
    pipe: Connection,
    task: ClusterTask,
    name: str,
    loop: str,
    num_waiters: int,
    num_rounds: int,
    idle_secs: float,
    heartbeat_secs: float,
) -> None:
    """Answer "waiting" before each step, then when each waiter resumed, and what idle ones sent."""
    idle = idle_secs, heartbeat_secs
    pipe.send(run_on(loop, waiting, pipe, task, name, num_waiters, num_rounds, idle))


def bytes_to(task: ClusterTask) -> tuple[int, int]:
    """(Bytes, segments with data) sent so far to the ps, on connections that are open now.

    Source: the kernel's `struct tcp_info`, of each socket of this process.
    """
    ports = {int(each.rsplit(":", 1)[1]) for each in task.cluster.job_tasks("ps")}
    num_bytes = num_segments = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # one that was closed meanwhile, or is not connected
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family != socket.AF_UNIX and end.getpeername()[1] in ports:
                    info = end.getsockopt(socket.IPPROTO_TCP, 11, 232)  # TCP_INFO
                    num_bytes += int.from_bytes(info[120:128], "little")
                    num_segments += int.from_bytes(info[156:160], "little")
    return num_bytes, num_segments


# The cost of notifications in a run.


def notifications(pipe: Connection, task: ClusterTask, sizes: list[int], num_runs: int) -> None:
    """Answer the median ms of a run by the tasks it may notify: none or some, due or not."""
    found: dict[str, list[float]] = {}
    runs: dict[str, Callable[[], Any]] = {}
    arm: list[Callable[[int], Any]] = []
    with ExitStack() as stack:
        for size in [0, *sizes]:
            graph, step, train_op = model(task, f"notifications{size}", is_dense=False)
            table = StepTable(step, size, None)
            news = table.news_after(train_op)
            with graph.as_default():
                init = v1.global_variables_initializer()
            session = v1.Session(task.target, graph=graph, config=task.config)
            stack.enter_context(session)
            session.run(init)
            session.run(table.begin_epoch, {table.known_epoch: 0})
            if size:
                runs[f"{size} tasks"] = session.make_callable(news)
                arm.append(partial(_arm, session, table))
            else:
                runs["a bare step"] = session.make_callable(train_op)
                runs["a step, and its value"] = session.make_callable([train_op, step])

        def measure(suffix: str) -> None:
            for turn in range(num_runs + WARM_UP):  # in turns, so that all meet the same machine
                for name, run in runs.items():
                    begun = time.perf_counter()
                    run()
                    if turn >= WARM_UP:
                        found.setdefault(name + suffix, []).append(time.perf_counter() - begun)

        measure("")
        for each in arm:
            each(0)
        measure(", one due")
    pipe.send({name: statistics.median(each) * 1e3 for name, each in found.items()})


def _arm(session: Any, table: StepTable, threshold: int) -> None:
    """Have the first task wait for a step."""
    session.run(table.exchange, {table.request: [0, -1, 1, 0, threshold, 0, 1, 0]})


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
