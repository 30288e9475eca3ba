"""`tensorflow1_before.py` after its move to asynchooks: look at the difference of the two files.

Both print the same. What changes is the import, `async with`, `await`, and how it is started.
"""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # fewer lines from TensorFlow at its start

import logging
import tempfile
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah

v1 = tf.compat.v1


def build() -> Any:
    v1.set_random_seed(1)
    pixels = v1.placeholder(tf.float32, [None, 64], name="pixels")
    labels = v1.placeholder(tf.int64, [None], name="labels")
    hidden = tf.nn.relu(pixels @ v1.get_variable("w1", [64, 64]) + v1.get_variable("b1", [64]))
    logits = hidden @ v1.get_variable("w2", [64, 10]) + v1.get_variable("b2", [10])
    loss = tf.identity(v1.losses.sparse_softmax_cross_entropy(labels, logits), name="loss")
    is_right = tf.equal(tf.argmax(logits, axis=1), labels)
    tf.reduce_mean(tf.cast(is_right, tf.float32), name="accuracy")
    v1.summary.scalar("loss", loss)
    global_step = v1.train.get_or_create_global_step()
    return v1.train.AdamOptimizer(0.003).minimize(loss, global_step)


def batches(pixels: Any, labels: Any) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(seed=1)
    while True:
        rows = rng.integers(len(pixels), size=64)
        yield {"pixels:0": pixels[rows], "labels:0": labels[rows]}


async def main(directory: str) -> None:
    digits = load_digits()
    pixels, test_pixels, labels, test_labels = train_test_split(
        digits.data / 16, digits.target, test_size=0.2, random_state=1, stratify=digits.target
    )
    feeds = batches(pixels, labels)
    held_out = {"pixels:0": test_pixels, "labels:0": test_labels}
    with tf.Graph().as_default():
        train_op = build()
        final = ah.FinalOpsHook([v1.train.get_global_step(), "loss:0", "accuracy:0"], held_out)
        hooks = [
            ah.StopAtStepHook(last_step=600),
            ah.LoggingTensorHook({"loss": "loss"}, every_n_iter=200),
            ah.NanTensorHook("loss:0"),
            ah.FeedFnHook(lambda: next(feeds)),
            final,
        ]
        monitored = ah.MonitoredTrainingSession(
            checkpoint_dir=directory, hooks=hooks, save_checkpoint_steps=250
        )
    async with monitored as session:
        while not session.should_stop():
            await session.run(train_op)

    print("step {}, loss {:.4f}, accuracy {:.4f}".format(*final.final_ops_values))
    for name in sorted(name for name in os.listdir(directory) if name.endswith(".index")):
        print(name)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("asynchooks").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as directory:
        anyio.run(main, directory)
