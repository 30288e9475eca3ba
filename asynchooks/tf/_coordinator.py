"""GraphCoordinator: ours, for TensorFlow's code that demands an instance of its own."""

from __future__ import annotations

import tensorflow as tf

from .._coordinator import Coordinator, ExcInfo
from .._stop_reason import StopReason


class GraphCoordinator(Coordinator, tf.compat.v1.train.Coordinator):  # type: ignore[misc]
    """Behaves as `Coordinator`; queue runners, looper threads and sync hooks accept it."""

    def request_stop(
        self,
        ex: BaseException | ExcInfo | None = None,
        *,
        reason: StopReason | str | None = None,
    ) -> None:
        # a queue runner whose enqueue the stop itself has cancelled reports that as an error
        error = ex[1] if isinstance(ex, tuple) else ex
        consequences = (tf.errors.CancelledError, tf.errors.OutOfRangeError)
        if (self.should_stop() or self.joined) and isinstance(error, consequences):
            return
        super().request_stop(ex, reason=reason)
