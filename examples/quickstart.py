"""Eight workers train one small network on real handwritten digits, on one event loop.

They share one TensorFlow session. Worker i joins when the global step is int(K * log(i + 1));
until then it is suspended in an `await`: nothing polls. Training stops exactly at LAST_STEP.

A bar shows how far they are, with a row for each worker. The log shows the workers that wait. At
the end it prints where each worker started, how many steps it ran, and the accuracy on digits that
were not trained on.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah


@contextmanager
def quiet() -> Iterator[None]:
    """Lose what is written to standard error, as by TensorFlow's libraries while they load."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
with quiet():
    import tensorflow as tf

NUM_WORKERS, LAST_STEP, K, BATCH_SIZE = 8, 4000, 200, 64


class Model:
    """A TensorFlow graph: 64 pixels, 128 hidden units, 10 digits."""

    def __init__(self, seed: int) -> None:
        v1 = tf.compat.v1
        v1.set_random_seed(seed)
        self.pixels = v1.placeholder(tf.float32, [None, 64])
        self.labels = v1.placeholder(tf.int64, [None])
        w1, b1 = v1.get_variable("w1", [64, 128]), v1.get_variable("b1", [128])
        w2, b2 = v1.get_variable("w2", [128, 10]), v1.get_variable("b2", [10])
        logits = tf.nn.relu(self.pixels @ w1 + b1) @ w2 + b2
        self.loss = v1.losses.sparse_softmax_cross_entropy(self.labels, logits)
        self.global_step = v1.train.get_or_create_global_step()
        self.train_op = v1.train.AdamOptimizer(0.002).minimize(self.loss, self.global_step)
        is_right = tf.equal(tf.argmax(logits, axis=1), self.labels)
        self.accuracy = tf.reduce_mean(tf.cast(is_right, tf.float32))


class Report(ah.SessionRunHook):
    """A hook of our own: what one worker did, and what the TensorFlow session says at the end."""

    def __init__(self, model: Model, test_feeds: dict[Any, Any]) -> None:
        self.model, self.test_feeds = model, test_feeds
        self.started_at, self.num_steps = -1, 0
        self.final_step, self.accuracy = -1, 0.0

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        if self.started_at < 0:
            self.started_at = run_context.global_step.value

    async def after_run(self, run_context: ah.SessionRunContext, _: ah.SessionRunValues) -> None:
        self.num_steps += 1

    async def end(self, session: tf.compat.v1.Session) -> None:
        fetches = [self.model.global_step, self.model.accuracy]
        self.final_step, self.accuracy = session.run(fetches, self.test_feeds)


async def main(seed: int = 0) -> list[Report]:
    digits = load_digits()
    pixels, test_pixels, labels, test_labels = train_test_split(
        digits.data / 16, digits.target, test_size=0.2, random_state=seed, stratify=digits.target
    )
    with tf.Graph().as_default():  # left before the first await: other tasks would see it
        model = Model(seed)
        creator = ah.SharedSessionCreator(ah.ChiefSessionCreator(), NUM_WORKERS)
    tests = {model.pixels: test_pixels, model.labels: test_labels}
    reports = [Report(model, tests) for _ in range(NUM_WORKERS)]

    async def worker(i: int) -> None:
        rng = np.random.default_rng([seed, i])
        hooks = [
            ah.GlobalStepWaiterHook(int(K * math.log(i + 1))),
            ah.StopAtStepHook(last_step=LAST_STEP),
            reports[i],
            ah.ProgressHook({"loss": model.loss}),
        ]
        async with ah.MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                rows = rng.integers(len(pixels), size=BATCH_SIZE)
                feeds = {model.pixels: pixels[rows], model.labels: labels[rows]}
                await session.run(model.train_op, feeds)

    print(f"{NUM_WORKERS} workers train one network, to step {LAST_STEP}", flush=True)
    begun = time.perf_counter()
    async with anyio.create_task_group() as group:
        for i in range(NUM_WORKERS):
            group.start_soon(worker, i)
    seconds = time.perf_counter() - begun

    for i, report in enumerate(reports):
        print(f"worker {i} started at step {report.started_at:4}, ran {report.num_steps:4} steps")
    print(f"final step {report.final_step}, {report.final_step / seconds:.0f} steps per second")
    print(f"test accuracy {report.accuracy:.4f}")
    return reports


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("asynchooks").setLevel(logging.INFO)  # what the hooks have to say
    anyio.run(main, backend=parser.parse_args().backend)
