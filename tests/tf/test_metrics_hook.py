"""MetricsHook in TensorFlow's own session, and in Keras's fit."""

from __future__ import annotations

import numpy as np
import pytest

from asynchooks import HooksCallback, MetricsHook, sync_hook

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow


def test_tensorflows_own_session_and_keras_give_points_too() -> None:
    points: list[tuple[int, float]] = []

    def take(step: int, values: dict[str, float]) -> None:
        points.extend((step, value) for value in values.values())

    with tf.Graph().as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        train_op = tf.compat.v1.assign_add(step, 1)
        tf.identity(tf.cast(train_op, tf.float32) / 2, name="half")
        hook = sync_hook(MetricsHook(take, "half", every_n_steps=2))
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(4):
                session.run(train_op)
    assert points == [(1, 0.5), (2, 1.0), (4, 2.0)]

    points.clear()
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = HooksCallback([MetricsHook(take, "loss", every_n_steps=2)])
    x = np.zeros((4, 1), np.float32)
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[callback])
    assert points == [(1, 0.0), (2, 0.0), (4, 0.0)]
