"""GraphCoordinator: ours, for TensorFlow's code that demands an instance of its own."""

from __future__ import annotations

import tensorflow as tf

from .._coordinator import Coordinator


class GraphCoordinator(Coordinator, tf.compat.v1.train.Coordinator):  # type: ignore[misc]
    """Behaves as `Coordinator`; queue runners, looper threads and sync hooks accept it."""
