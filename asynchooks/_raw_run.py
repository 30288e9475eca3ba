"""One raw run: the step between before_run and after_run, wherever it runs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Hashable
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
    key: Hashable,
    step: GlobalStep,
    ticket: Ticket,
) -> Any:
    """Run the step and settle its ticket with the step after the run.

    Whoever runs the step settles, so that a thread whose task was cancelled still publishes it.

    Raises:
        StopTraining: the step's input ended.
        BaseException: what the step raised.
    """

    pending = _Pending(raw, step, ticket)

    def run() -> Any:
        value = None
        try:
            raw.enter_run()
        except BaseException:
            step.settle(ticket)
            raise
        is_pending = False
        try:
            outputs = raw.run(merged.fetches, merged.feed_dict, options, merged.run_metadata)
            is_pending = isinstance(outputs, Awaitable)
            if not is_pending:
                value = raw.read_step()
        except BaseException as error:
            value = raw.read_step_after(error)
            raise
        finally:
            if not is_pending:
                step.settle(ticket, value)
                raw.leave_run()
        return pending.offer(outputs) if is_pending else outputs

    try:
        if raw.is_async:
            outputs = run()
        else:
            outputs = await runner.run(run, raw.step_times, key, raw.loss)
        return await pending.finish() if outputs is pending else outputs
    except BaseException as error:
        pending.give_up()
        step.abandon(ticket)
        if is_input_end(error):
            raise StopTraining("the input ended in the step") from error
        if isinstance(error, (TypeError, ValueError, LookupError)):
            merged.blame(error)
        raise


class _Pending:
    """A step that turned out to be a coroutine, perhaps in a thread whose caller has left."""

    def __init__(self, raw: RawSession, step: GlobalStep, ticket: Ticket) -> None:
        self._raw = raw
        self._step = step
        self._ticket = ticket
        self._lock = threading.Lock()  # guards the next two
        self._outputs: Awaitable[Any] | None = None
        self._is_given_up = False

    def offer(self, outputs: Awaitable[Any]) -> _Pending:
        """Have the event loop go on with it."""
        with self._lock:
            self._outputs = outputs
            is_late = self._is_given_up
        if is_late:
            self.give_up()
        return self

    def give_up(self) -> None:
        """Nobody will go on with it: close it unrun, if there is one."""
        with self._lock:
            self._is_given_up = True
            outputs, self._outputs = self._outputs, None
        if outputs is not None:
            self._step.settle(self._ticket)
            self._raw.leave_run()
            if inspect.iscoroutine(outputs):
                outputs.close()

    async def finish(self) -> Any:
        """Go on with it here."""
        assert self._outputs is not None
        pending, self._outputs = self._outputs, None
        value = None
        try:
            outputs = await pending
            value = self._raw.read_step()
        finally:
            self._step.settle(self._ticket, value)
            self._raw.leave_run()
        return outputs
