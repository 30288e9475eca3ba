"""GlobalStepWaiterHook: delays a worker until the others have reached a global step."""

from __future__ import annotations

import logging

from .. import _check
from .._hook import SessionRunContext, SessionRunHook, worker_of
from .._log import fields

logger = logging.getLogger("asynchooks")

_LOG_EVERY_STEPS = 1000


@_check.names_options
class GlobalStepWaiterHook(SessionRunHook):
    """Suspends a worker's first run until the global step is reached; for a gradual start.

    Unlike TensorFlow's, which polls every half a second, it is woken by the step. The wait ends
    with StopTraining when the session is stopped, and with StepUnreachableError when no worker is
    left that could move the step there. Where the number of workers is not known, others may still
    join: then a worker that is alone waits, and the log says so.

    Args:
        wait_until_step: the global step to wait for; <= 0 returns at once.

    Raises:
        TypeError: it is not an integer.

    Example:
        hooks = [GlobalStepWaiterHook(int(100 * math.log(worker + 1)))]
    """

    needs_global_step = True
    uses_default_graph = False
    needs_session_in_begin = False
    _shown = (("wait_until_step", "_wait_until_step"),)

    def __init__(self, wait_until_step: int) -> None:
        self._wait_until_step = _check.integer(
            "wait_until_step", wait_until_step, expected="an integer number of steps"
        )
        self._has_started = False

    async def begin(self) -> None:
        self._has_started = False

    async def before_run(self, run_context: SessionRunContext) -> None:
        if self._has_started:
            return
        step, target = run_context.global_step, self._wait_until_step
        if target > 0:
            extra = fields(self, step=step.value, worker=worker_of(run_context))
            logger.info("Waiting for global step %d before starting training.", target, extra=extra)
        reached = 0
        while reached < target:
            reached = await step.wait_for(min(target, max(reached, step.value) + _LOG_EVERY_STEPS))
            if reached < target:
                logger.info(
                    "Waiting for global step %d before starting training. Current step is %d.",
                    target,
                    reached,
                    extra=fields(self, step=reached, worker=worker_of(run_context)),
                )
        self._has_started = True
