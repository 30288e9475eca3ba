"""One raw run: the step between before_run and after_run, on the event loop or in a thread.

Whoever runs the step settles its ticket, so that a thread whose task was cancelled still
publishes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from ._connection import Connection
from ._engine import Engine
from ._gate import Ticket
from ._global_step import GlobalStep
from ._raw_session import RawSession
from ._runner import INLINE_SECS, Probe, StepRunner, StepTimes
from ._session_creator import Lease
from ._signal import Signal
from ._work_thread import Outcome

RunArguments = tuple[Any, Any, Any, Any]
"""(fetches, feed_dict, options, run_metadata)."""

NOT_HERE = Signal("NOT_HERE")
"""What `RawRuns.here` returns for a step that it did not run."""


class RawRuns:
    """Runs the steps of one session, one at a time, and the plain methods of its hooks.

    The session makes it when it opens.
    """

    __slots__ = (
        "_connection", "_engine", "_fetches", "_lease", "_plain_times", "_probe", "_raw", "_runner",
        "_step", "_tick",
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine,
        runner: StepRunner,
        step: GlobalStep,
        lease: Lease,
        connection: Connection,
    ) -> None:
        self._engine = engine
        self._tick = engine.tick
        self._runner = runner
        self._step = step
        self._lease = lease
        self._connection = connection
        self._plain_times: StepTimes | None = None  # of plain methods, once there is one
        self._raw: RawSession | None = None
        self._fetches: Any = None
        self._probe: Probe  # of the kind of step that ran last: these fetches of this raw session

    def forget(self) -> None:
        """Hold no raw session any more, nor what was fetched of it."""
        self._raw = self._fetches = None

    def here(self, raw: RawSession, args: RunArguments) -> Any:
        """Run the step on the event loop without waiting, if that can and should be done now.

        Nobody retires the raw session meanwhile: only tasks of its event loop do.

        Returns:
            What was fetched, or `NOT_HERE`.
        """
        if args[0] is not self._fetches or raw is not self._raw:
            self._raw, self._fetches = raw, args[0]
            key = raw.run_key(args[0])
            self._probe = self._runner.probe(raw.step_times, key, blocks=not raw.is_async)
        probe, step = self._probe, self._step
        if probe.in_thread or raw.is_retired:
            return NOT_HERE
        begun = self._tick()
        if begun >= self._engine.turn_due_at:
            return NOT_HERE
        result = step.run_here(raw, args)
        if result is None:
            return NOT_HERE
        if type(result[1]) is Ticket:
            raw.enter_run()
            return Unfinished(raw, step, result[1], result[0])
        if probe.is_timed:
            elapsed = self._tick() - begun
            if elapsed > INLINE_SECS or probe.num_slow or self._runner.last_in_thread is probe:
                self._runner.learn(probe, elapsed)
        return result[0]

    async def anywhere(self, raw: RawSession, args: RunArguments) -> Any:
        """Run the step where the runner wants it; waits for its turn, a ticket, a thread.

        Returns:
            What was fetched, or an `Unfinished` step.
        """
        engine, step, probe = self._engine, self._step, self._probe
        if not probe.is_warm:
            await self._runner.wait_for_first(probe)
        if not probe.in_thread and engine.tick() >= engine.turn_due_at:  # a thread is a turn itself
            await engine.turn()
            outputs = self.here(raw, args)
            if outputs is not NOT_HERE:
                return outputs
        # asked for only now: a hook that waits for data must not keep others from running
        ticket = step.take_ticket_nowait() or await step.take_ticket()
        loss = self._connection.step_loss
        try:
            return await self._runner.run_probed(
                lambda: _run(raw, args, step, ticket, self._connection), probe, loss, _give_up
            )
        except BaseException:
            step.abandon(ticket)
            raise

    def call_plain(self, fn: Callable[[], Any], kind: Hashable) -> Awaitable[Any] | None:
        """Call plain methods where blocking steps run: here, and return None, or what to await.

        Those of one kind take about the same time.
        """
        raw = self._connection.raw
        times = self._plain_times = self._plain_times or StepTimes(forgives=False)
        if raw is not None:
            times.always_in_thread = raw.step_times.always_in_thread
        probe = self._runner.probe(times, kind)
        if probe.in_thread:
            loss = None if raw is None else raw.loss
            return self._runner.run_probed(lambda: self._lease.call(fn), probe, loss)
        begun = self._tick()
        try:
            self._lease.call(fn)
        finally:
            self._runner.learn(probe, self._tick() - begun)
        return None


def _run(
    raw: RawSession, args: RunArguments, step: GlobalStep, ticket: Ticket, connection: Connection
) -> Any:
    """Run the step in this thread, whoever waits; an `Unfinished` if it is a coroutine."""
    try:
        raw.enter_run()
    except BaseException:
        step.settle(ticket)
        raise
    try:
        result = raw.run_step(args)
    except BaseException as error:
        after = None
        try:
            after = raw.read_step_after(error)
        finally:
            step.settle(ticket, after)
            raw.leave_run()
        raise
    if type(result) is not tuple:
        return Unfinished(raw, step, ticket, result)
    connection.has_run = True  # before others may stand alone with the model
    step.settle(ticket, result[1])
    raw.leave_run()
    return result[0]


class Unfinished:
    """A step that turned out to be a coroutine, which the event loop goes on with.

    It keeps its ticket and its place in the raw session until it has finished.
    """

    __slots__ = ("_raw", "_result", "_step", "_ticket")

    def __init__(
        self,
        raw: RawSession,
        step: GlobalStep,
        ticket: Ticket,
        result: Awaitable[tuple[Any, Any]],
    ) -> None:
        self._raw = raw
        self._step = step
        self._ticket = ticket
        self._result = result

    async def finish(self) -> Any:
        """Go on with it here."""
        after = None
        try:
            outputs, after = await self._result
        finally:
            self._step.settle(self._ticket, after)
            self._raw.leave_run()
        return outputs

    def give_up(self) -> None:
        """Nobody will go on with it: close it unrun."""
        self._step.settle(self._ticket)
        self._raw.leave_run()
        if inspect.iscoroutine(self._result):
            self._result.close()


def _give_up(outcome: Outcome) -> None:
    """The caller of a step in a thread has left before it ended."""
    if type(outcome.value) is Unfinished:
        outcome.value.give_up()
