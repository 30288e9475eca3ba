"""Ranking: by which number the checkpoint of a step is ranked. It compares none."""

from __future__ import annotations

import logging
import math
from typing import Any

from ..._hook import SessionRunContext
from ..._log import fields
from ...backends._raw_session import RawSession
from .._metrics import Metric

logger = logging.getLogger("asynchooks")


class Ranking:
    """The metric of one saver: of the run or the evaluation that made the step which is saved.

    Args:
        metric: None where checkpoints have none.
    """

    def __init__(self, metric: Metric | None) -> None:
        self._metric = metric
        self._restored: dict[int, float | None] = {}  # by its step, which is the only key
        # where the raw session does not keep outputs of all workers' runs, the results of the own
        # run that made a step, the last one, with its epoch
        self._own: tuple[tuple[int, int], Any] | None = None
        self._keeps_outputs = False
        self._has_said_nan = False

    def begin(self, raw: RawSession) -> None:
        """A new raw session: have its runs say what a save needs."""
        if self._metric is not None and self._metric.args is not None:
            self._keeps_outputs = raw.keep_outputs(self._metric.args.fetches)

    def forget(self) -> None:
        """The model is restored: no run has made its step."""
        self._restored, self._own = {}, None

    def restored(self, step: int, metric: float | None) -> None:
        """The model is that of this step, whose checkpoint has this metric."""
        self._restored = {step: metric}

    def before_run(self, run_context: SessionRunContext) -> None:
        """A run of this worker is to begin: whether it makes a step is seen by the one before."""
        if self._metric is not None and self._metric.args is not None and not self._keeps_outputs:
            _ = run_context.global_step.value  # on a graph it is read where it may have moved

    def note_run(self, run_context: SessionRunContext, results: Any) -> None:
        """A run of this worker has ended: perhaps it made the step that is saved next."""
        if self._metric is None or self._metric.args is None or self._keeps_outputs:
            return
        place = run_context.global_step.epoch, run_context.step
        if self._own is None or self._own[0] != place:  # else it only looks at that step
            self._own = place, results

    def read(self, raw: RawSession, step: int) -> float | None:
        """The metric of the run or the evaluation of this step, if it is known."""
        metric = self._metric
        if metric is None:
            return None
        value, name = metric.at(step), metric.source
        if isinstance(name, str) and self._keeps_outputs:
            kept = raw.kept_outputs(step)
            value = metric.number(kept[name]) if name in kept else None
        elif self._own is not None and self._own[0] == (raw.global_step.epoch, step):
            is_known = raw.global_step.gate.is_made_alone(step)
            value = metric.number(self._own[1]) if is_known else None
        if value is None and (metric.args is not None or metric.result is not None):
            return self._restored.get(step)
        return self.checked(value, step)

    def evaluated_at(self, step: int) -> float | None:
        """The metric of an evaluation of this step; None if that was not evaluated last."""
        if self._metric is None or self._metric.result is None:
            return None
        return self.checked(self._metric.at(step), step)

    def checked(self, value: float | None, step: int) -> float | None:
        """The value, but None for NaN, which ranks nothing; that is said once."""
        if value is None or not math.isnan(value):
            return value
        if self._metric is not None and not self._has_said_nan:
            self._has_said_nan = True
            logger.warning(
                "The metric %s is NaN at step %d: the checkpoint of such a step has no metric, and "
                "is none of the best",
                self._metric.shown,
                step,
                extra=fields("CheckpointSaverHook", step=step),
            )
        return None
