"""EarlyStoppingHook: ends training whose metric no longer improves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .. import _check
from .._engine.recording import current_stand_in
from .._engine.stop import StopReason
from .._hook import (
    FinishPhase,
    SessionHooks,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    worker_of,
)
from .._log import fields
from .._running.hook_state import HookState
from .._stopping.coordinator import Coordinator
from .._stopping.session_stop import SessionStop
from ..checkpoints import Checkpoint, Mode
from ._metrics import METRIC_FETCHES, Metric
from .checkpoint._saver_hook import CheckpointSaverHook

logger = logging.getLogger("asynchooks")


@_check.names_options
class EarlyStoppingHook(SessionRunHook):
    """Stops all workers of the model when a metric has not improved for a number of looks at it.

    A fetch, or a function, is looked at after each run of this session; `EvaluationHook.metric`
    once for each evaluation. The count, the best value and its step are saved with checkpoints: a
    training that had stopped stops again as soon as it is resumed, unless `patience` is greater.

    Args:
        metric: fetches of one number; `evaluation.metric("accuracy")`; a function that returns a
            number, or None when there is nothing to look at; or a `Metric` of these.
        patience: looks in a row without improvement before the stop, >= 1.
        min_delta: how much a value must exceed the best one to be better, >= 0.
        mode: short for the metric's own, `Metric(..., mode=...)`: `Mode.MIN` if smaller is better,
            `Mode.MAX` if larger is, or their texts. If neither says it, the name does where that is
            plain, as `val_loss` or `accuracy` are; otherwise a warning asks for it, and smaller is
            better.
        restore_best: whether a training that this hook has stopped ends, when no worker trains any
            more, with the model of the best checkpoint. A CheckpointSaverHook of the session must
            have the same `metric`, and `retention=Retention(keep_best=1)`, and on a graph
            `background=True`. Only what it has saved can be brought back: `best` and `best_step`
            are then those of that checkpoint.

    Raises:
        ValueError, TypeError: an argument is out of its range, or of another type, or `mode` is
            not the metric's own.
        RuntimeError: when opening: `restore_best` without such a CheckpointSaverHook, or with
            several, or the EvaluationHook of the metric is not in the session.
        ValueError: when opening: a CheckpointSaverHook keeps the best by the same metric, in the
            other mode.
        MetricError: out of `run`: the metric is NaN, or no number.

    Source: the idea and the arguments are those of Keras's `EarlyStopping`.

    Example:
        hooks = [EarlyStoppingHook("loss", patience=10, min_delta=1e-3)]
    """

    uses_default_graph = False
    _fetches_are = METRIC_FETCHES
    _shown = (("metric", "_metric.source"), ("patience", "_patience"), ("mode", "_mode"))

    def __init__(
        self,
        metric: Any,
        patience: int,
        *,
        min_delta: float = 0.0,
        mode: Mode | str | None = None,
        restore_best: bool = False,
    ) -> None:
        self._metric = Metric.of(metric, mode, "EarlyStoppingHook")
        looks = "an integer number of looks >= 1"
        self._patience = _check.integer("patience", patience, least=1, expected=looks)
        self._min_delta = _check.number(
            "min_delta", min_delta, least=0, finite=False, expected="a number >= 0"
        )
        self._mode = self._metric.mode
        self._restores_best = restore_best
        self.uses_default_graph = self._metric.args is None  # perhaps the user's function
        self._saver: CheckpointSaverHook | None = None
        self._stop_of_session: SessionStop | None = None  # those of its session; None by hand
        self._forget()

    def _forget(self) -> None:
        self._last_taken: int | None = None  # the step of the last evaluation that was looked at
        self._best: float | None = None
        self._best_step: int | None = None
        self._num_worse = 0
        self._reason: StopReason | None = None  # why this hook has stopped training

    @property
    def best(self) -> float | None:
        """The best value so far, None before the first look; that of the model brought back."""
        return self._best

    @property
    def best_step(self) -> int | None:
        """The global step that it belongs to."""
        return self._best_step

    async def begin(self) -> None:
        self._forget()
        self._saver = None
        shared = SessionHooks.of(self)
        self._stop_of_session = shared.stop
        shared.checks.append(lambda: self._find_saver([*shared.hooks, *shared.begun]))

    def _find_saver(self, hooks: Sequence[Any]) -> None:
        """Find what this hook needs among the session's hooks, each of which has begun."""
        self._metric.check_is_taken(hooks, "EarlyStoppingHook")
        found = {id(each): each for each in hooks if isinstance(each, CheckpointSaverHook)}
        savers = [(each.best_by, each) for each in found.values() if each.best_by is not None]
        same = [(by, each) for by, each in savers if by.is_same(self._metric)]
        for by, saver in same:
            if by.mode is not self._mode:
                raise ValueError(
                    f"{self!r} and {saver!r} decide by one metric, {self._metric.shown}, the one "
                    f"in {self._mode}, the other in {by.mode}; say it once, and give both the same "
                    f'metric: Metric({self._metric.shown}, mode="{self._mode.value}")'
                )
        if current_stand_in() is not None or not self._restores_best:
            return  # a plan saves nothing that could be restored
        if len(same) != 1:
            others = ", ".join(sorted(by.shown for by, _ in savers)) or "none"
            raise RuntimeError(
                f"EarlyStoppingHook(restore_best=True) got {len(same)} CheckpointSaverHooks that "
                f"keep the best by {self._metric.shown}, of those that keep it by: {others}; "
                "expected one, whose checkpoint it restores. Give the session one "
                f"CheckpointSaverHook(..., metric={self._metric.shown}, "
                "retention=Retention(keep_best=1)), on a graph with background=True (of functions, "
                "give both hooks the same object)"
            )
        self._saver = same[0][1]

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        if self._num_worse >= self._patience:  # the restored training has stopped already
            reason = self._stop(session.global_step.value, None)
            coord.request_stop(reason=reason, all_workers=True)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return self._metric.args

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._metric.args is not None:
            self._look(run_context, run_values.results)
        else:

            async def look() -> None:
                self._look(run_context, None)

            # an exclusive evaluation ends after every after_run
            run_context.finish_with(look, phase=FinishPhase.DECIDE)

    async def before_end(self, session: Any) -> None:
        stop, saver = self._stop_of_session, self._saver
        if self._reason is None or saver is None:
            return
        if stop is None or stop.reason is self._reason:  # else something else came first
            saver.checkpointer.restore_best_at_end(self._take_best)

    def _look(self, run_context: SessionRunContext, results: Any) -> None:
        is_of_run = self._metric.args is not None
        step = run_context.step if is_of_run else run_context.global_step.value
        taken = self._metric.read(results, step)
        if taken is None:
            return
        step, value = taken
        if self._metric.result is not None:  # each evaluation is looked at once
            if step == self._last_taken:
                return
            self._last_taken = step
        best = self._best
        if best is None or self._mode.is_better(value, best, by=self._min_delta):
            self._best, self._best_step, self._num_worse = value, step, 0
            return
        self._num_worse += 1
        if self._num_worse >= self._patience:
            reason = self._stop(step, worker_of(run_context))
            run_context.request_stop(reason, all_workers=True)

    def _stop(self, step: int, worker: int | None) -> StopReason:
        """Why training stops."""
        best = f"{self._best:g} of step {self._best_step}"
        why = f"no better than {best} for {self._num_worse} looks ({self._mode.says})"
        extra = fields(self, step=step, worker=worker, reason=why)
        logger.info("Early stopping: %s", why, extra=extra)
        self._reason = StopReason("EarlyStoppingHook", why)
        return self._reason

    def _take_best(self, checkpoint: Checkpoint | None, step: int) -> None:
        """The model is that of this checkpoint now; of none, it stays as it is at this step."""
        assert self._best is not None
        if checkpoint is None or checkpoint.metric is None:
            logger.warning(
                "No checkpoint has a metric: the model stays as it is at step %d, and the best one "
                "that was seen, %g of step %s, is not brought back. A checkpoint has the metric of "
                "a run or an evaluation of its own step: save the steps that are looked at",
                step,
                self._best,
                self._best_step,
                extra=fields(self, step=step),
            )
            return
        if self._mode.is_better(self._best, checkpoint.metric):
            logger.warning(
                "The model is that of step %d, with %g: the best one that was seen, %g of step "
                "%s, is in no checkpoint. Save the steps that are looked at",
                checkpoint.step,
                checkpoint.metric,
                self._best,
                self._best_step,
                extra=fields(self, step=step),
            )
        self._best, self._best_step = checkpoint.metric, checkpoint.step

    def state_dict(self) -> dict[str, Any]:
        state = {
            "best": self._best,
            "best_step": self._best_step,
            "num_worse": self._num_worse,
            "metric": {"last_taken": self._last_taken},
        }
        return HookState(state, **self._metric.identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best, step = state["best"], state["best_step"]
        if best is not None:
            best = _check.number("the saved best", best, finite=False, expected="a number")
            step = _check.integer("the saved best_step", step, least=0)
        self._best, self._best_step = best, step
        self._num_worse = _check.integer("the saved num_worse", state["num_worse"], least=0)
        last = state["metric"]["last_taken"]
        self._last_taken = None if last is None else _check.integer("last_taken", last, least=0)
