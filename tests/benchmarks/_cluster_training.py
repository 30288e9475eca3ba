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

from ._cluster_model import creator, model, until_asked
from ._report import run_on

v1 = tf.compat.v1


async def our_training(
    pipe: Connection, task: ClusterTask, name: str, is_dense: bool, last_step: int, limited: bool
) -> list[list[float]]:
    graph, _, train_op = model(task, name, is_dense=is_dense)
    with graph.as_default():
        shared = SharedSessionCreator(creator(task))
    ended: list[list[float]] = [[] for _ in range(task.workers_per_process)]

    async def run(times: list[float]) -> None:
        hooks = [StopAtStepHook(last_step=last_step)] if limited else []
        async with MonitoredSession(hooks, shared) as session:
            while not session.should_stop() and (limited or session.global_step.value < last_step):
                await session.run(train_op)
                times.append(time.monotonic())

    with graph.as_default():
        keeper = MonitoredSession([], shared)
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
    pipe: Connection,
    task: ClusterTask,
    name: str,
    kind: str,
    is_dense: bool,
    last_step: int,
    limited: bool = True,
) -> None:
    """Answer "open", wait for a line, then answer when each run of each worker ended."""
    if kind == "TensorFlow":
        pipe.send(their_training(pipe, task, name, is_dense, last_step))
    else:
        pipe.send(run_on(kind, our_training, pipe, task, name, is_dense, last_step, limited))


def final_step(pipe: Connection, task: ClusterTask, name: str) -> None:
    graph, step, _ = model(task, name, is_dense=False)
    with v1.Session(task.target, graph=graph, config=task.config) as session:
        pipe.send(int(session.run(step)))
