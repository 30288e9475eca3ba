"""How one process of a cluster trains while it is measured, by our sessions or TensorFlow's.

The chief opens first, and says so, for TensorFlow's workers would sleep for 30 s. It
judges nothing.
"""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
import tensorflow as tf

from asynchooks import ClusterTask, MonitoredSession, SharedSessionCreator, StopAtStepHook
from asynchooks.tf import ChiefSessionCreator, WorkerSessionCreator

from ._report import run_on

v1 = tf.compat.v1


def model(task: ClusterTask, name: str, *, is_dense: bool = False) -> tuple[Any, Any, Any]:
    """(graph, step, train op); whatever the name, no other training's variables."""
    graph = tf.Graph()
    with graph.as_default(), v1.device(task.device()), v1.variable_scope(name):
        step = v1.train.get_or_create_global_step()
        if not is_dense:
            return graph, step, v1.assign_add(step, 1).op
        inputs, layer = tf.random.stateless_normal([32, 64], [0, 1]), 32
        for size in (layer, 10):
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


async def our_training(
    pipe: Connection, task: ClusterTask, name: str, is_dense: bool, last_step: int
) -> list[list[float]]:
    graph, _, train_op = model(task, name, is_dense=is_dense)
    ended: list[list[float]] = [[] for _ in range(task.workers_per_process)]
    with graph.as_default():
        shared = SharedSessionCreator(creator(task))
        keeper = MonitoredSession([], shared)

    async def run(times: list[float]) -> None:
        async with MonitoredSession([StopAtStepHook(last_step=last_step)], shared) as session:
            while not session.should_stop():
                await session.run(train_op)
                times.append(time.monotonic())

    async with keeper, anyio.create_task_group() as group:
        pipe.send("open")
        await until_asked(pipe)
        for times in ended:
            group.start_soon(run, times)
    return ended


def their_training(
    pipe: Connection, task: ClusterTask, name: str, is_dense: bool, last_step: int
) -> list[list[float]]:
    graph, _, train_op = model(task, name, is_dense=is_dense)
    ended: list[list[float]] = [[] for _ in range(task.workers_per_process)]

    def session(is_chief: bool) -> Any:
        hooks = [v1.train.StopAtStepHook(last_step=last_step)]
        with graph.as_default():
            return v1.train.MonitoredTrainingSession(
                task.target, is_chief, hooks=hooks, config=task.config, log_step_count_steps=None
            )

    def run(opened: Any, times: list[float]) -> None:
        with graph.as_default(), opened:
            while not opened.should_stop():
                opened.run(train_op)
                times.append(time.monotonic())

    sessions = [session(task.is_chief and place == 0) for place in range(len(ended))]
    threads = [
        threading.Thread(target=run, args=each) for each in zip(sessions, ended, strict=True)
    ]
    pipe.send("open")
    pipe.recv()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def train(
    pipe: Connection, task: ClusterTask, name: str, kind: str, is_dense: bool, last_step: int
) -> None:
    """Answer "open", wait for a line, then answer when each run of each worker ended."""
    args = pipe, task, name, is_dense, last_step
    pipe.send(their_training(*args) if kind == "TensorFlow" else run_on(kind, our_training, *args))


def final_step(pipe: Connection, task: ClusterTask, name: str) -> None:
    graph, step, _ = model(task, name)
    with v1.Session(task.target, graph=graph, config=task.config) as session:
        pipe.send(int(session.run(step)))
