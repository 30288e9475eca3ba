"""A tf.data pipeline feeding a TensorFlow graph, read in a thread while the steps run.

The pipeline shuffles handwritten digits, moves them about at random, and batches them, with all
that tf.data has for it. It is made outside of the graph, in TensorFlow's eager mode; the session
gets what comes out of it. Interrupted and started again, training goes on with the next batch:
the position in the data is saved with the model.

It prints the step at which training begins, and the accuracy; the log shows the loss, and what
share of the time training waited for data.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's start-up notes say nothing here

import anyio
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah
from asynchooks.data import prefetch

v1 = tf.compat.v1


def moved(image: Any, label: Any) -> dict[str, Any]:
    """The 8 x 8 image one pixel off, in a random direction that depends on the seed alone."""
    padded = tf.pad(image, [[1, 1], [1, 1]])
    return {"image": tf.image.random_crop(padded[..., None], [8, 8, 1], seed=2), "label": label}


def build_model() -> tuple[dict[str, Any], Any, Any, Any]:
    images = v1.placeholder(tf.float32, [None, 8, 8, 1], "images")
    labels = v1.placeholder(tf.int64, [None], "labels")
    kernels = v1.get_variable("kernels", [3, 3, 1, 16])
    weights = v1.get_variable("weights", [8 * 8 * 16, 10])
    hidden = tf.nn.relu(tf.nn.conv2d(images, kernels, 1, "SAME"))
    scores = tf.matmul(tf.reshape(hidden, [-1, 8 * 8 * 16]), weights)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)
    loss = tf.reduce_mean(losses)
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(scores, 1), labels), tf.float32))
    step = v1.train.get_or_create_global_step()
    train_op = v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step)
    return {"image": images, "label": labels}, loss, accuracy, train_op


async def main(last_step: int, directory: str) -> None:
    digits = load_digits()
    images, tests, labels, test_labels = train_test_split(
        digits.images.astype("float32") / 16, digits.target, test_size=0.25, random_state=0
    )
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(1000, seed=1).repeat()
    dataset = dataset.map(moved, num_parallel_calls=tf.data.AUTOTUNE).batch(64)
    source = prefetch(dataset, 4)
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(3)
        names, loss, accuracy, train_op = build_model()
        hooks = [
            ah.PreemptionHook(),
            ah.StopAtStepHook(last_step=last_step),
            ah.FeedHook(source, names),
            ah.DataWaitHook(source, every_n_steps=200),
            ah.LoggingTensorHook({"loss": loss}, every_n_iter=200),
            ah.CheckpointSaverHook(directory, save_steps=200, background=True),
        ]
        creator = ah.ChiefSessionCreator(checkpoint_dir=directory)
        async with ah.MonitoredSession(hooks, creator) as session:
            print(f"training begins at step {session.global_step.value}", flush=True)
            while not session.should_stop():
                await session.run(train_op)
            feed = {names["image"]: tests[..., None], names["label"]: test_labels}
            result = session.raw_session().run(accuracy, feed)
    print(f"test accuracy {result:.3f} after {session.global_step.value} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--directory", help="for checkpoints; a temporary one by default")
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or temporary
        anyio.run(main, arguments.steps, directory, backend=arguments.backend)
