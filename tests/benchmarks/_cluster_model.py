"""What the processes of a measured cluster train, and how they wait for a go-ahead."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
import tensorflow as tf

from asynchooks import ClusterTask
from asynchooks.tf import ChiefSessionCreator, WorkerSessionCreator

v1 = tf.compat.v1


def model(task: ClusterTask, name: str, *, is_dense: bool) -> tuple[Any, Any, Any]:
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
