"""What one process of a cluster does while it is measured: it trains, waits or publishes.

`ClusterProcess` starts the process, and asks it through a pipe; what a function here returns is the
answer. It judges nothing.
"""

import inspect
import os
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import anyio
import anyio.to_thread
import tensorflow as tf

from asynchooks import ClusterTask, MonitoredSession, SharedSessionCreator, StopAtStepHook
from asynchooks.tf import ChiefSessionCreator, WorkerSessionCreator

from ._report import run_on

v1 = tf.compat.v1

PAUSE_SECS = 0.03
"""Between asking for a step and having it published: the waiters are idle by then."""


def model(task: ClusterTask, name: str, *, is_dense: bool = False) -> tuple[Any, Any, Any]:
    """(graph, step, train op); whatever the name, no other training's variables."""
    graph = tf.Graph()
    with graph.as_default(), v1.device(task.device()), v1.variable_scope(name):
        step = v1.train.get_or_create_global_step()
        if not is_dense:
            return graph, step, v1.assign_add(step, 1).op
        inputs = tf.random.stateless_normal([32, 64], [0, 1])
        for size in (32, 10):
            weights = v1.get_variable(f"weights{size}", [inputs.shape[1], size])
            inputs = tf.nn.relu(inputs @ weights + v1.get_variable(f"bias{size}", [size]))
        loss = tf.reduce_mean(tf.square(inputs))
        train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
        return graph, step, train_op


def creator(task: ClusterTask, **options: Any) -> Any:
    kind = ChiefSessionCreator if task.is_chief else WorkerSessionCreator
    return kind(master=task.target, config=task.config, **options)


async def until_asked(pipe: Connection) -> None:
    await anyio.to_thread.run_sync(pipe.recv)


async def publish(pipe: Connection, task: ClusterTask, name: str, num_rounds: int) -> list[float]:
    """Say "open"; publish whenever asked to; when each run began."""
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


async def wait(
    pipe: Connection, task: ClusterTask, name: str, num_waiters: int, num_rounds: int
) -> list[list[float]]:
    """Say "waiting" before each step; when each waiter resumed, by step."""
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


async def train(
    pipe: Connection, task: ClusterTask, name: str, is_dense: bool, last_step: int
) -> list[list[float]]:
    """Say "open", wait to be asked; when each run of each worker ended."""
    graph, _, train_op = model(task, name, is_dense=is_dense)
    ended: list[list[float]] = [[] for _ in range(task.workers_per_process)]
    with graph.as_default():
        shared = SharedSessionCreator(creator(task))

    async def run(times: list[float]) -> None:
        async with MonitoredSession([StopAtStepHook(last_step=last_step)], shared) as session:
            while not session.should_stop():
                await session.run(train_op)
                times.append(time.monotonic())

    async with MonitoredSession([], shared), anyio.create_task_group() as group:
        pipe.send("open")
        await until_asked(pipe)
        for times in ended:
            group.start_soon(run, times)
    return ended


def train_theirs(
    pipe: Connection, task: ClusterTask, name: str, is_dense: bool, last_step: int
) -> list[list[float]]:
    """As `train`, by TensorFlow's sessions.

    The chief has to open first: TensorFlow's workers would sleep for 30 s.
    """
    graph, _, train_op = model(task, name, is_dense=is_dense)
    ended: list[list[float]] = [[] for _ in range(task.workers_per_process)]

    def run(opened: Any, times: list[float]) -> None:
        with graph.as_default(), opened:
            while not opened.should_stop():
                opened.run(train_op)
                times.append(time.monotonic())

    threads = []
    for place, times in enumerate(ended):
        with graph.as_default():
            opened = v1.train.MonitoredTrainingSession(
                task.target, task.is_chief and place == 0, config=task.config,
                hooks=[v1.train.StopAtStepHook(last_step=last_step)], log_step_count_steps=None,
            )  # fmt: skip
        threads.append(threading.Thread(target=run, args=(opened, times)))
    pipe.send("open")
    pipe.recv()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def final_step(pipe: Connection, task: ClusterTask, name: str) -> int:
    graph, step, _ = model(task, name)
    with v1.Session(task.target, graph=graph, config=task.config) as session:
        return int(session.run(step))


def play(pipe: Connection, cluster: dict[str, list[str]], job: str, index: int, size: int) -> None:
    """What the process does: what it is asked for, until it is killed."""
    v1.logging.set_verbosity(v1.logging.ERROR)
    task = ClusterTask(cluster, job, index, workers_per_process=size)
    task.start()
    pipe.send("up")
    while True:
        role, loop, options = pipe.recv()
        call = partial(globals()[role], pipe, task, **options)
        pipe.send(run_on(loop, call) if inspect.iscoroutinefunction(call.func) else call())
