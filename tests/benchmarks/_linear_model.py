"""The small TensorFlow graph that the benchmarks train. It measures nothing."""

from dataclasses import dataclass
from typing import Any

BATCH = [[0.5, -1.0, 2.0, 1.0]] * 8


@dataclass(frozen=True)
class LinearModel:
    """One gradient step of a linear layer, in a graph of its own.

    Its loss is float32, shape (); its inputs are a placeholder, float32, shape (None, 4), if it is
    fed, otherwise the constant `BATCH`.
    """

    graph: Any
    train_op: Any
    loss: Any
    inputs: Any


def linear_model(*, is_fed: bool = False) -> LinearModel:
    import tensorflow as tf

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        inputs = v1.placeholder(tf.float32, [None, 4]) if is_fed else tf.constant(BATCH)
        targets = tf.constant([[1.0, -1.0]] * len(BATCH))
        weights = v1.get_variable("weights", [4, 2], initializer=v1.zeros_initializer())
        bias = v1.get_variable("bias", [2], initializer=v1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(inputs @ weights + bias - targets))
        step = v1.train.create_global_step()
        train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
    return LinearModel(graph, train_op, loss, inputs)
