"""StepCounterHook: steps per second, in the log and in TensorBoard."""

from __future__ import annotations

import logging
from typing import Any

from .._check import names_options
from .._hook import SessionRunContext, SessionRunValues, worker_of
from .._log import fields, show
from .._stopping.coordinator import Coordinator
from ._summaries import SummaryWriter, TimedOutputHook

logger = logging.getLogger("asynchooks")

_MAX_WARNINGS = 5


@names_options
class StepCounterHook(TimedOutputHook):
    """Logs how many global steps pass per second, under the tag `<global step's name>/sec`.

    The first run only starts the clock. Each value is labelled with the step after the run. Unless
    the program configures logging, the lines go to standard error.

    Args:
        every_n_steps: steps between two values, >= 0.
        every_n_secs: seconds between two values, >= 0; exactly one of the two is given, so this
            one needs every_n_steps=None.
        output_dir: directory for an event file, if no writer is given; hooks of a process share it.
        summary_writer: a writer with `add_summary(summary, global_step)` and `flush()`, such as
            `tf.compat.v1.summary.FileWriter`; it stays open.

    Raises:
        ValueError: both or neither interval are given.
        ImportError: in begin: output_dir needs TensorBoard, which is not installed.

    Source: TensorFlow's `tf.compat.v1.train.StepCounterHook`.

    Example:
        hooks = [StepCounterHook(every_n_steps=50, output_dir="logs")]
    """

    acts_outside = True
    uses_default_graph = False
    needs_session_in_begin = False
    _shown = (("every_n_steps", "_timer._every_steps"), ("every_n_secs", "_timer._every_secs"))

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | None = None,
        summary_writer: SummaryWriter | None = None,
    ) -> None:
        super().__init__(
            output_dir, summary_writer, every_n_secs=every_n_secs, every_n_steps=every_n_steps
        )
        self._tag = "global_step/sec"
        self._last_step: int | None = None
        self._num_warnings = 0

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)
        self._tag = f"{session.global_step.name}/sec"
        self._last_step = None  # a session that was lost may come to the same step again

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = run_context.global_step.value
        if self._timer.should_trigger_for_step(step):
            seconds, steps = self._timer.update_last_triggered_step(step)
            if seconds and steps is not None:  # a clock that has not moved gives no rate
                self._output.add_scalar(self._tag, steps / seconds, step)
                show(
                    self,
                    "%s: %g",
                    self._tag,
                    steps / seconds,
                    step=step,
                    worker=worker_of(run_context),
                )
        stands = step == self._last_step and not run_context.global_step.published_only
        if stands and self._num_warnings < _MAX_WARNINGS:  # under a protocol it may stand still
            self._num_warnings += 1
            logger.warning(
                "%s has not moved: it is %s after this run, as after the one before. If training "
                "should move it, give it to the optimizer: minimize(loss, global_step=...)",
                run_context.global_step.name,
                step,
                extra=fields(self, step=step, worker=worker_of(run_context)),
            )
        self._last_step = step
