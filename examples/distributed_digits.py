"""Handwritten digits on TensorFlow's parameter servers, several workers on each process's loop.

The variables and the global step live on the ps. Each process that trains builds the graph for
itself and lends one session, on its own server, to its workers. The workers of all processes take
turns to join, and training stops exactly at LAST_STEP, wherever the last step is made.

It starts a ps and three processes that train on this machine. On several machines, start it once
for each task, with TF_CONFIG in the environment: then it is that task alone.

Each process that trains prints at which steps its workers began and how many they ran; the chief
prints the accuracy, too. The chief's log shows the workers that wait, and the speed.
"""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # fewer lines from TensorFlow at its start

import json
import logging
import math
import multiprocessing
import signal
import socket
import sys
from contextlib import ExitStack
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

import anyio
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah

LAST_STEP, K, BATCH_SIZE, SEED = 2000, 100, 64, 0
NUM_PROCESSES, WORKERS_PER_PROCESS = 3, 8


class Model:
    """A TensorFlow graph: 64 pixels, 128 hidden units, 10 digits."""

    def __init__(self) -> None:
        v1 = tf.compat.v1
        v1.set_random_seed(SEED)
        self.pixels = v1.placeholder(tf.float32, [None, 64])
        self.labels = v1.placeholder(tf.int64, [None])
        w1, b1 = v1.get_variable("w1", [64, 128]), v1.get_variable("b1", [128])
        w2, b2 = v1.get_variable("w2", [128, 10]), v1.get_variable("b2", [10])
        logits = tf.nn.relu(self.pixels @ w1 + b1) @ w2 + b2
        loss = v1.losses.sparse_softmax_cross_entropy(self.labels, logits)
        self.global_step = v1.train.get_or_create_global_step()
        self.train_op = v1.train.AdamOptimizer(0.002).minimize(loss, self.global_step)
        is_right = tf.equal(tf.argmax(logits, axis=1), self.labels)
        self.accuracy = tf.reduce_mean(tf.cast(is_right, tf.float32))


async def train(task: ah.ClusterTask) -> None:
    """The workers of one process."""
    digits = load_digits()
    pixels, test_pixels, labels, test_labels = train_test_split(
        digits.data / 16, digits.target, test_size=0.2, random_state=SEED, stratify=digits.target
    )
    with tf.Graph().as_default(), tf.compat.v1.device(task.device()):
        model = Model()
        make = ah.ChiefSessionCreator if task.is_chief else ah.WorkerSessionCreator
        own = make(master=task.target, config=task.config)
        creator = ah.SharedSessionCreator(own, task.workers_per_process)
    # processes are 0, 1, 2 ...; with a job "chief" it is that one, and worker 0 comes after it
    chiefs = task.num_processes - (0 if task.is_chief else task.cluster.num_tasks("worker"))
    process = 0 if task.is_chief else task.index + chiefs
    tests = {model.pixels: test_pixels, model.labels: test_labels}
    final = ah.FinalOpsHook([model.global_step, model.accuracy], tests)
    starts: list[int | None] = [None] * task.workers_per_process
    num_steps = [0] * task.workers_per_process

    async def worker(i: int) -> None:
        number = i * task.num_processes + process  # so that the processes take turns to grow
        rng = np.random.default_rng([SEED, number])
        hooks: list[Any] = [
            ah.GlobalStepWaiterHook(int(K * math.log(number + 1))),
            ah.StopAtStepHook(last_step=LAST_STEP),
        ]
        if number == 0:
            hooks += [final, ah.StepCounterHook(every_n_steps=500)]
        async with ah.MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                rows = rng.integers(len(pixels), size=BATCH_SIZE)
                feeds = {model.pixels: pixels[rows], model.labels: labels[rows]}
                await session.run(model.train_op, feeds)
                starts[i] = starts[i] or session.global_step.value
                num_steps[i] += 1

    async with anyio.create_task_group() as group:
        for i in range(task.workers_per_process):
            group.start_soon(worker, i)

    print(f"{task.name} began by the steps {starts}, ran {num_steps} steps")
    if task.is_chief:
        step, accuracy = final.final_ops_values
        print(f"{task.name}: final step {step}, test accuracy {accuracy:.4f}")


async def main() -> None:
    task = ah.ClusterTask.from_tf_config()
    if task.is_chief:
        logging.getLogger("asynchooks").setLevel(logging.INFO)  # what its hooks have to say
    if task.is_ps:
        await task.serve()  # until training has ended everywhere
        return
    async with task:
        await train(task)


def run_task(config: str) -> None:
    """One process of the cluster, which does not outlive the one that started it."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        Thread(target=end_with_parent, daemon=True).start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the one that started it
    os.environ["TF_CONFIG"] = config
    logging.basicConfig(format="%(message)s")
    anyio.run(main)


def run_all() -> int:
    """All processes of a cluster on this machine; returns the exit code of the first that fails."""
    tasks = [("ps", 0), *(("worker", index) for index in range(NUM_PROCESSES))]
    with ExitStack() as stack:  # ports that are free at this moment
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in tasks]
        ps, *workers = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    shared = {
        "cluster": {"ps": [ps], "worker": workers},
        "workers_per_process": WORKERS_PER_PROCESS,
    }
    context = multiprocessing.get_context("spawn")
    running = []
    for job, index in tasks:
        config = json.dumps({**shared, "task": {"type": job, "index": index}})
        running.append(context.Process(target=run_task, args=(config,), daemon=True))
        running[-1].start()
    while running:
        wait([process.sentinel for process in running])
        for process in [each for each in running if each.exitcode is not None]:
            running.remove(process)
            if process.exitcode:
                return abs(process.exitcode)  # the others end with this process
    return 0


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        run_task(os.environ["TF_CONFIG"])
    else:
        try:
            sys.exit(run_all())
        except KeyboardInterrupt:
            sys.exit(130)  # as a shell says it
