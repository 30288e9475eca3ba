"""The small TensorFlow graph that the benchmarks train. It measures nothing."""

from __future__ import annotations

from typing import Any


def linear_model() -> tuple[Any, Any]:
    """(a new graph, its train op): one gradient step of a linear layer on constants."""
    import tensorflow as tf

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        inputs = tf.constant([[0.5, -1.0, 2.0, 1.0]] * 8)
        targets = tf.constant([[1.0, -1.0]] * 8)
        weights = v1.get_variable("weights", [4, 2], initializer=v1.zeros_initializer())
        bias = v1.get_variable("bias", [2], initializer=v1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(inputs @ weights + bias - targets))
        step = v1.train.create_global_step()
        train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
    return graph, train_op
