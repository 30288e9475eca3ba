"""One raw run: the step between before_run and after_run, wherever it runs."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ._errors import StopTraining, is_input_end
from ._gate import Ticket
from ._global_step import GlobalStep
from ._merge import MergedRun
from ._raw_session import RawSession
from ._runner import StepRunner


async def run_raw(
    runner: StepRunner,
    raw: RawSession,
    merged: MergedRun,
    options: Any,
    step: GlobalStep,
    ticket: Ticket,
) -> Any:
    """Run the step and settle its ticket with the step after the run.

    Whoever runs the step settles, so that a thread whose task was cancelled still publishes it.

    Raises:
        StopTraining: the step's input ended.
        BaseException: what the step raised.
    """

    def run() -> Any:
        outputs: Any = None
        value = None
        try:
            raw.enter_run()
        except BaseException:
            step.settle(ticket)
            raise
        try:
            outputs = raw.run(merged.fetches, merged.feed_dict, options, merged.run_metadata)
            if not isinstance(outputs, Awaitable):
                value = raw.read_step()
        except BaseException as error:
            value = raw.read_step_after(error)
            raise
        finally:
            if not isinstance(outputs, Awaitable):
                step.settle(ticket, value)
                raw.leave_run()
        return outputs

    try:
        if raw.is_async:
            outputs = run()
        else:
            outputs = await runner.run(run, raw.step_times, raw.run_key(merged.fetches))
        if isinstance(outputs, Awaitable):
            outputs = await _finish(raw, outputs, step, ticket)
    except BaseException as error:
        if is_input_end(error):
            raise StopTraining("the input ended in the step") from error
        raise
    return outputs


async def _finish(
    raw: RawSession, pending: Awaitable[Any], step: GlobalStep, ticket: Ticket
) -> Any:
    value = None
    try:
        outputs = await pending
        value = raw.read_step()
    finally:
        step.settle(ticket, value)
        raw.leave_run()
    return outputs
