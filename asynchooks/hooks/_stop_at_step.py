"""StopAtStepHook: ends training exactly at a global step."""

from __future__ import annotations

from typing import Any

from .. import _check
from .._engine.stop import StopReason
from .._errors import StopTraining
from .._hook import SessionRunContext, SessionRunHook, SessionRunValues
from .._stopping.coordinator import Coordinator
from ..backends._raw_session import RawSession

_STEPS = "an integer number of steps"


@_check.names_options
class StopAtStepHook(SessionRunHook):
    """Stops training exactly at a global step, however many workers of this process share it.

    It sets a limit on the global step: `session.run` starts no step that could lead beyond it,
    and raises StopTraining once it is reached. Where a run moves the step by k, the stop is within
    k - 1. Unlike TensorFlow's, it runs nothing when the step is there already. Only runs that
    move the step count.

    A worker that asks for a step after another one has taken the last leaves its block by that
    StopTraining: what must happen at the end belongs in `end`, or after the block.

    Args:
        num_steps: steps to run, counted from the step found when the session is first created
            (not again when it is recreated; a hook that is used again keeps its last step, but in
            another library's loop each `fit` runs so many steps).
        last_step: the global step to stop at; exactly one of the two is given.

    Raises:
        ValueError: both or neither are given.
        TypeError: an argument is not an integer.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=1000)], creator) as session:
            while not session.should_stop():
                await session.run(train_op)
    """

    needs_global_step = True
    uses_default_graph = False
    _shown = (("num_steps", "_num_steps"), ("last_step", "_last_step"))

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError(
                f"got num_steps={num_steps} and last_step={last_step}; give exactly one of them"
            )
        if num_steps is not None:
            num_steps = _check.integer("num_steps", num_steps, expected=_STEPS)
        else:
            last_step = _check.integer("last_step", last_step, expected=_STEPS)
        self._num_steps, self._last_step = num_steps, last_step

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        is_new = isinstance(session, RawSession) and session.begins_training
        if self._num_steps is not None and (is_new or self._last_step is None):
            self._last_step = session.global_step.value + self._num_steps
        assert self._last_step is not None
        session.global_step.raise_limit(self._last_step)

    async def before_run(self, run_context: SessionRunContext) -> None:
        # with several hooks on one step the largest limit holds; this one may be smaller
        if self._is_reached(run_context):
            if not run_context.global_step.is_at_limit and run_context.called_by is not None:
                run_context.called_by.stop.note(self._reason(run_context))
            raise StopTraining(f"{run_context.global_step!r} has reached step {self._last_step}")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        # at the limit should_stop() is True by itself; but a later hook may set the step back
        if self._is_reached(run_context):
            run_context.request_stop(self._reason(run_context))

    def _reason(self, run_context: SessionRunContext) -> StopReason:
        step = run_context.global_step
        if step.is_at_limit:
            return StopReason("the limit", f"{step.name} is at {step.value} of {step.limit}")
        return StopReason("StopAtStepHook", f"{step.name} has reached {self._last_step}")

    def _is_reached(self, run_context: SessionRunContext) -> bool:
        return self._last_step is not None and run_context.global_step.value >= self._last_step
