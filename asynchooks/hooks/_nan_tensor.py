"""NanTensorHook: ends training when the loss is no number."""

from __future__ import annotations

import logging
import math
from numbers import Number
from typing import Any

from .._errors import NanLossDuringTrainingError
from .._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

logger = logging.getLogger("asynchooks")


class NanTensorHook(SessionRunHook):
    """Looks at the loss of each run; NaN fails the training, or stops it. Infinity does neither.

    Args:
        loss_tensor: what to fetch, a scalar of any floating dtype: a tensor or its name ("x:0"),
            on a step function the name of an output.
        fail_on_nan_loss: whether to raise; otherwise the hook only asks to stop.

    Raises:
        NanLossDuringTrainingError: out of `run`: the loss is NaN.
        ValueError: out of `run`: the loss is no scalar.

    Source: TensorFlow's `tf.compat.v1.train.NanTensorHook`.

    Example:
        hooks = [NanTensorHook("loss", fail_on_nan_loss=False)]
    """

    _looks_at_default_graph = False

    def __init__(self, loss_tensor: Any, fail_on_nan_loss: bool = True) -> None:
        self._args = SessionRunArgs(loss_tensor)
        self._fails = fail_on_nan_loss

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return self._args

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        loss = run_values.results
        shape = getattr(loss, "shape", None)
        if shape is None and isinstance(loss, Number):
            shape = ()
        if shape is None or (shape and math.prod(shape) != 1):
            raise ValueError(
                f"the loss {self._args.fetches!r} came to {loss!r}; give a scalar, a tensor rather "
                "than an op (by name: 'loss:0')"
            )
        if loss == loss:  # only NaN differs from itself
            return
        if self._fails:
            logger.error("Model diverged with loss = NaN.")
            raise NanLossDuringTrainingError
        logger.warning("Model diverged with loss = NaN.")
        run_context.request_stop()
