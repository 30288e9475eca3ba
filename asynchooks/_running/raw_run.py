"""One raw run: the step between before_run and after_run, on the event loop or in a thread.

The thread that runs the step settles its ticket, so that it is published also where its task was
cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any

from .._engine.base import Engine, Sentinel
from .._engine.stop import Stop
from .._engine.sync import NO_LOCK, CallLock
from .._engine.threads import (
    INLINE_SECS,
    Outcome,
    Probe,
    StepRunner,
    StepTimes,
    close_unrun,
    is_async,
)
from .._errors import is_preemption
from .._hook import SessionRunContext
from .._step.gate import Ticket
from .._step.global_step import GlobalStep
from ..backends._creator import SessionHandle
from ..backends._raw_session import RawSession
from .lifecycle import SessionLifecycle

RunArguments = tuple[Any, Any, Any, Any]
"""(fetches, feed_dict, options, run_metadata)."""

NOT_HERE = Sentinel("NOT_HERE")
"""What `RawRuns.here` returns for a step that it did not run."""


class RawRuns:
    """Runs the steps of one session, one at a time, and the plain methods of its hooks."""

    __slots__ = (
        "_call_lock", "_engine", "_fetches", "_handle", "_lifecycle", "_plain_times", "_probe",
        "_raw", "_runner", "_step", "_thread", "_tick", "_ticket", "made",
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine,
        runner: StepRunner,
        step: GlobalStep,
        handle: SessionHandle,
        lifecycle: SessionLifecycle,
    ) -> None:
        self._engine, self._tick = engine, engine.tick
        self._runner, self._step = runner, step
        self._handle, self._lifecycle = handle, lifecycle
        self._plain_times: StepTimes | None = None  # of plain methods, once there is one
        self._thread = threading.get_ident()  # of the event loop
        self._raw: RawSession | None = None
        self._call_lock: CallLock = NO_LOCK  # that one's
        self._fetches: Any = None
        self._ticket: Ticket | None = None  # the last one, to be used again
        self.made: int | None = None
        """The global step that the last run made, as of `Admission.settle`."""
        self._probe: Probe  # of the kind of step that ran last: these fetches of this raw session

    def forget(self) -> None:
        """Hold no raw session any more, nor what was fetched of it."""
        self._raw = self._fetches = None

    def here(self, raw: RawSession, args: RunArguments) -> Any:
        """Run the step on the event loop without waiting, if that can and should be done now.

        Else `NOT_HERE`. The raw session is not retired meanwhile: only tasks of its event loop do
        that. No hold of the call lock is taken: see `CallLock`.
        """
        if args[0] is not self._fetches or raw is not self._raw:
            self._raw, self._fetches = raw, args[0]
            self._call_lock = NO_LOCK if raw.is_async else raw.call_lock
            key = raw.run_key(args[0])
            self._probe = self._runner.probe(raw.step_times, key, blocks=not raw.is_async)
        probe, admission = self._probe, self._step.admission
        if probe.in_thread or raw.is_retired:
            return NOT_HERE
        begun = self._tick()
        if begun >= self._engine.turn_due_at:
            return NOT_HERE
        epoch = admission.begin_here(self._call_lock)
        if epoch is None:
            return NOT_HERE
        try:
            result = raw.run_and_read_step(args)
        except BaseException as error:
            after = None
            try:
                _note_loss(raw, error)
                after = raw.read_step_after(error)
            finally:
                admission.end_here(epoch, after)
            raise
        if type(result) is not tuple:
            raw.enter_run()
            self._ticket = admission.suspend_here(epoch, self._ticket)
            return Unfinished(raw, self._step, self._ticket, result, self)
        self.made = admission.end_here(epoch, result[1])
        if probe.is_timed:
            elapsed = self._tick() - begun
            if elapsed > INLINE_SECS or probe.num_slow or self._runner.last_in_thread is probe:
                self._runner.learn(probe, elapsed)
        return result[0]

    async def anywhere(
        self, raw: RawSession, args: RunArguments, context: SessionRunContext | None
    ) -> Any:
        """Run the step where the runner wants it; waits for its turn, a ticket, a thread.

        Returns what was fetched, or an `Unfinished` step.

        Args:
            context: of the run: a thread that makes the step says so there; None without hooks.
        """
        engine, step, probe = self._engine, self._step, self._probe
        admission = step.admission
        if not probe.is_warm:
            await self._runner.wait_for_first(probe)
        if not probe.in_thread and engine.tick() >= engine.turn_due_at:  # a thread is a turn itself
            await engine.turn()
            outputs = self.here(raw, args)
            if outputs is not NOT_HERE:
                return outputs
        # asked for only now: a hook that waits for data must not keep others from running
        ticket = admission.take_ticket_nowait(self._ticket)
        if ticket is None:
            ticket = await admission.take_ticket(step.stop)
        self._ticket = ticket
        lost_step, lock = self._lifecycle.lost_step, NO_LOCK if raw.is_async else raw.call_lock
        hold = lock.take_nowait()
        if hold is None:
            stop, grace_secs = self._lifecycle.stops.run_stop, self._runner.grace_secs
            try:
                hold = await lock.take(engine, grace_secs, stop=stop, lost_peer=lost_step)
            except BaseException:
                admission.give_back(ticket)
                raise
        try:
            call = hold.around(lambda: self._run(raw, args, ticket, context))
            outputs = await self._runner.run_probed(call, probe, lost_step, Unfinished.give_up)
        except BaseException:
            if hold.abandon():
                admission.abandon(ticket)
            else:
                admission.give_back(ticket)
            raise
        self.made = None if context is None else context._made
        return outputs

    def _run(
        self,
        raw: RawSession,
        args: RunArguments,
        ticket: Ticket,
        context: SessionRunContext | None,
    ) -> Any:
        """Run the step in this thread; an `Unfinished` if it is a coroutine."""
        settle = self._step.admission.settle
        try:
            raw.enter_run()
        except BaseException:
            settle(ticket)
            raise
        try:
            result = raw.run_and_read_step(args)
        except BaseException as error:
            after = None
            try:
                _note_loss(raw, error)
                after = raw.read_step_after(error)
            finally:
                settle(ticket, after)
                raw.leave_run()
            raise
        if type(result) is not tuple:
            return Unfinished(raw, self._step, ticket, result, self)
        if context is not None:
            context._is_made = True  # before others may be alone with the model
        made = settle(ticket, result[1])
        if context is not None:
            context._made = made
        raw.leave_run()
        return result[0]

    def call_plain(
        self, fn: Callable[[], Any], kind: Hashable, ends_at_stop: bool = False
    ) -> Awaitable[Any] | None:
        """As `dispatch.CallPlain`."""
        stop = self._lifecycle.stops.run_stop if ends_at_stop else None
        raw = self._lifecycle.raw
        times = self._plain_times = self._plain_times or StepTimes(forgives=False)
        if raw is not None:
            times.always_in_thread = raw.step_times.always_in_thread
        probe = self._runner.probe(times, kind)
        lock = self._handle.creator.call_lock if raw is None else raw.call_lock
        if probe.in_thread and not lock.is_needed:
            lost_peer = None if raw is None else raw.lost_peer
            return self._runner.run_probed(lambda: self._handle.call(fn), probe, lost_peer)
        if probe.in_thread or raw is None or not lock.is_free:
            return self._call_alone(fn, probe, lock, raw, stop)
        lock.here = self._thread  # instead of a hold: see `CallLock`
        begun = self._tick()
        is_alone = lock.is_free
        try:
            if is_alone:
                self._handle.call(fn)
        finally:
            lock.here = 0
            if not lock.is_free:
                lock.pass_on()
            if is_alone:
                self._runner.learn(probe, self._tick() - begun)
        return None if is_alone else self._call_alone(fn, probe, lock, raw, stop)

    async def call_step_fn(self, raw: RawSession, step_fn: Callable[..., Any], arg: Any) -> Any:
        """Call a step_fn, a sync one where steps run; a stop ends the wait for another call."""
        if is_async(step_fn):
            return await step_fn(arg)
        kind: Any = getattr(step_fn, "__code__", type(step_fn))  # itself it may not be hashable
        probe, stop = self._runner.probe(raw.step_times, kind), self._lifecycle.stops.stop
        result = await self._call_alone(lambda: step_fn(arg), probe, raw.call_lock, raw, stop)
        return await result if isinstance(result, Awaitable) else result

    async def _call_alone(
        self,
        fn: Callable[[], Any],
        probe: Probe,
        lock: CallLock,
        raw: RawSession | None,
        stop: Stop | None,
    ) -> Any:
        lost_peer = None if raw is None else raw.lost_peer
        hold = lock.take_nowait() or await lock.take(
            self._engine, self._runner.grace_secs, stop=stop, lost_peer=lost_peer
        )
        try:
            call = hold.around(lambda: self._handle.call(fn))
            return await self._runner.run_probed(call, probe, lost_peer)
        finally:
            hold.abandon()  # unless it has ended

    async def call_begin(self, fn: Callable[[], Any]) -> Any:
        """Call a plain `begin` on the event loop, before there is a raw session."""
        lock = self._handle.creator.call_lock
        hold = lock.take_nowait() or await lock.take(self._engine, self._runner.grace_secs)
        return hold.around(fn)()


@dataclass(slots=True, eq=False)
class Unfinished:
    """A step that turned out to be a coroutine, which the event loop goes on with.

    It keeps its ticket and its place in the raw session until it has finished.
    """

    _raw: RawSession
    _step: GlobalStep
    _ticket: Ticket
    _result: Awaitable[tuple[Any, Any]]
    _runs: RawRuns

    async def finish(self) -> Any:
        """Go on with it here."""
        after = None
        worker = self._step.worker
        if worker is not None:
            worker.step = self._result
        try:
            outputs, after = await self._result
        except BaseException as error:
            _note_loss(self._raw, error)
            raise
        finally:
            if worker is not None:
                worker.step = None
            self._runs.made = self._step.admission.settle(self._ticket, after)
            self._raw.leave_run()
        return outputs

    @staticmethod
    def give_up(outcome: Outcome) -> None:
        """Close it unrun, if it is one: the task that was to go on with it has left."""
        step = outcome.value
        if type(step) is Unfinished:
            step._step.admission.settle(step._ticket)
            step._raw.leave_run()
            close_unrun(step._result)


def _note_loss(raw: RawSession, error: BaseException) -> None:
    """A run has failed, and still holds its ticket: nobody saves the model meanwhile."""
    if is_preemption(error):
        raw.is_lost = True
