"""Steps in flight: a step is submitted before the results of those before it have come.

The calls of one session with two in flight (B before_run, S submission, R results, A after_run):

    run 1: B1 S1 B2 S2 R1 A1      run 2: B3 S3 R2 A2      run 3: B4 S4 R3 A3 ...

Each run has a task of its own from B to R; `run` completes the oldest. A session of one step at a
time uses nothing of this file. What an error leads to: `_session.py`, `lifecycle.py`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar

from .._engine.base import Engine, EngineTask, Slot
from .._engine.stacks import holds_loop
from .._errors import StopTraining, add_note, is_preemption
from .._hook import Pending, SessionRunArgs, SessionRunContext
from .._step.gate import Ticket
from .._step.global_step import GlobalStep
from .._step.waiters import Worker
from .._stopping.session_stop import interruption
from ..backends._raw_session import RawSession
from .dispatch import HookCall, values_of
from .lifecycle import SessionLifecycle
from .merge import MergedRun
from .phase import OneRun
from .raw_run import RunArguments

logger = logging.getLogger("asynchooks")

_ALL_CANCELLED_SECS = 0.01
"""Where all tasks of an event loop are cancelled, how long one may take to notice it."""
_NO_ARGS: RunArguments = ((), None, None, None)
_NO_RESULTS: Mapping[int, Any] = {}


class _Stage(IntEnum):
    """How far a run has come."""

    PREPARING = 0  # its before_run, and the wait for its turn
    SUBMITTING = 1
    SUBMITTED = 2
    COMPLETE = 3  # its results are there, or it has failed


class _StepOfRun(GlobalStep):
    """The global step as the hooks of one run see it: in after_run, as that run has left it.

    Later runs in flight may have moved it since.
    """

    __slots__ = ("after",)

    def __init__(self, step: GlobalStep, worker: Worker | None) -> None:
        self.admission, self.stop = step.admission, step.stop  # a handle, as of `bound`
        self.worker, self.body = worker, None
        self.after: int | None = None  # there during after_run

    @property
    def value(self) -> int:
        return super().value if self.after is None else self.after


class InFlightContext(SessionRunContext):
    """A run that may overlap with others, as its hooks see it."""

    __slots__ = ("is_given_up",)

    overlaps: ClassVar[bool] = True

    def __init__(self, args: RunArguments, raw: RawSession, step: _StepOfRun) -> None:
        super().__init__(args, raw.exposed, step)
        self.is_given_up = False  # there is no after_run


class _Flight:
    """One run, from its before_run to its after_run."""

    __slots__ = (
        "_engine", "after", "awaited", "context", "epoch", "error", "explained", "hold",
        "is_cancelled", "merged", "outputs", "raw", "stage", "step", "task",
        "ticket", "waiters",
    )  # fmt: skip

    def __init__(
        self, engine: Engine, args: RunArguments, raw: RawSession, step: _StepOfRun
    ) -> None:
        self._engine = engine
        self.raw, self.step = raw, step
        self.context = InFlightContext(args, raw, step)
        self.stage = _Stage.PREPARING
        self.is_cancelled = False
        self.merged: MergedRun | None = None
        self.ticket: Ticket | None = None
        self.awaited: Any = None  # the coroutine of its step
        self.outputs: Any = None
        self.epoch: int | None = None  # of the global step when the outputs came
        self.after: int | None = None  # the global step after it, if it was made
        self.error: BaseException | None = None
        self.explained: BaseException | None = None  # the error as it leaves the run
        self.hold: Slot | None = None  # while it waits until nothing is in flight
        self.task: EngineTask | None = None
        self.waiters: list[Slot] = []

    @property
    def is_out(self) -> bool:
        """Whether its step may be under way, or has been made."""
        if self.stage < _Stage.SUBMITTING or self.context.is_given_up:
            return False
        return self.error is None or self.after is not None

    async def wait(self) -> None:
        """Wait until it is complete. Cancellation safe."""
        if self.stage is not _Stage.COMPLETE:
            slot = Slot(self._engine, "the results of a step")
            self.waiters.append(slot)
            await self._engine.park(slot)

    def complete(self) -> None:
        self.stage, self.awaited = _Stage.COMPLETE, None
        for slot in self.waiters:
            slot.wake()


class InFlight:
    """The runs of one session that has several steps in flight; it makes this when it opens.

    Args:
        depth: steps in flight at once, > 1.
        step: the handle by which the session's runs are admitted.
        one_run: what the session's calls of `run` have in common.
    """

    def __init__(
        self,
        depth: int,
        lifecycle: SessionLifecycle,
        step: GlobalStep,
        one_run: OneRun,
    ) -> None:
        self._depth, self._step, self._one_run = depth, step, one_run
        self._lifecycle, self._stops, self._engine = lifecycle, lifecycle.stops, lifecycle.engine
        # a before_run may be under way while after_run of an earlier run is called
        self._hooks, self._hooks_before = lifecycle.hooks, lifecycle.hooks.twin()
        self._flights: deque[_Flight] = deque()  # in the order of their before_run
        self._args: RunArguments | None = None  # of the `run` that waits: only then others begin
        self._pending = Pending()  # what completed runs have put off until nothing is in flight
        self._is_draining = False  # nothing is submitted until that is done
        self._loss: BaseException | None = None  # raised when the results that have come are landed
        self._call: HookCall | None = None  # in after_run, or what that has put off
        self._is_closed = False
        lifecycle.in_flight = self
        if step.worker is not None:
            step.worker.step = self  # for `Worker.is_in_step`

    @property
    def cr_running(self) -> bool:
        """Whether the running task is in one of the steps: a coroutine's attribute, for all."""
        return any(getattr(each.awaited, "cr_running", False) for each in self._flights)

    @property
    def has_results(self) -> bool:
        """Whether runs are still to return results, or to recover from a loss."""
        if self._is_closed:
            return False
        return self._loss is not None or any(each.is_out for each in self._flights)

    async def run(self, args: RunArguments) -> Any:
        """Complete the oldest run, while others are prepared and submitted.

        A cancellation leaves those in flight as they are: the next call goes on with them.
        """
        self._check(args)
        failures = 0
        while True:
            flight = self._call = self._hooks.current = None
            self._args, self._one_run.is_under_way = args, True
            try:
                flight = await self._oldest()
                return await self._land(flight, args)
            except BaseException as error:
                explained = self._explained(error, flight)
                if self._is_loss(explained):
                    made = self._made()
                    await self._give_up(keep=made)  # the others ran on what was lost, too
                    if made:
                        self._loss = explained
                        continue
                elif isinstance(explained, Exception) and flight is not None:
                    await self._begin_behind_again()
                leaving = await self._lifecycle.leaving(explained, failures, self._one_run)
                if leaving is error:
                    raise
                if leaving is not None:
                    raise leaving from leaving.__cause__
                failures += 1
            finally:
                self._args = None
                self._one_run.end()

    def _is_loss(self, error: BaseException) -> bool:
        """Whether what is under way has to be submitted again."""
        if is_preemption(error):
            return True
        return isinstance(error, Exception) and self._lifecycle.was_replaced

    def _made(self) -> list[_Flight]:
        """Runs whose results have come, on a model that was not restored since."""
        epoch = self._step.epoch
        return [
            each for each in self._flights
            if each.epoch == epoch and each.error is None and not each.context.is_given_up
        ]  # fmt: skip

    async def _begin_behind_again(self) -> None:
        """After an error of a run: what it was fed is to be fed again, before what comes next.

        So a run that has not submitted its step begins anew, or its input may wait for that step.
        """
        waiting = [each for each in self._flights if not each.is_out and each.error is None]
        await self._end([*waiting, *(each for each in self._flights if _is_end(each))])

    def _check(self, args: RunArguments) -> None:
        _, feed_dict, options, run_metadata = args
        if feed_dict:
            raise ValueError(
                f"run() got the feed_dict {feed_dict!r} with in_flight={self._depth}: later steps "
                "are submitted before their run is called, so that no caller could feed them. Have "
                "a hook feed each step: FeedHook(source, names)"
            )
        if options is not None or run_metadata is not None:
            raise ValueError(
                f"run() got run options or metadata with in_flight={self._depth}; they are for "
                "TensorFlow graphs: leave them out"
            )
        self._step.admission.refuse_to_wait_for_itself(self._engine, is_exclusive=False)

    async def _oldest(self) -> _Flight:
        """The oldest run, complete; begins one if there is none."""
        flights, stops = self._flights, self._stops
        if any(each.context.is_given_up for each in flights):  # the wait for them was cancelled
            await self._end([each for each in flights if each.context.is_given_up])
        if self._loss is not None and not flights:
            loss, self._loss = self._loss, None
            raise loss
        if self._is_draining and not any(each.is_out for each in flights):  # the last one failed
            await self._finish_pending()
        raw = stops.ready
        if raw is not None and not raw.is_retired:
            self._top_up()
        elif stops.is_asked or stops.is_asked_by_hook or stops.is_to_stop:
            raise stops.refusal()  # steps in flight are completed at the end of the block
        elif not flights:
            self._begin(await self._lifecycle.revive(is_nested=False))
        flight = flights[0]
        await self._wait_for(flight)
        flights.popleft()
        return flight

    async def _wait_for(self, flight: _Flight) -> None:
        await flight.wait()
        if flight.is_cancelled:
            slot = Slot(self._engine, "the cancellation of this task")
            await self._engine.park(slot, self._engine.now() + _ALL_CANCELLED_SECS)

    def _top_up(self) -> None:
        """Begin another run, if there is room, and the one before it has been submitted."""
        flights, raw = self._flights, self._stops.ready
        if self._args is None or self._is_closed or len(flights) >= self._depth:
            return
        if self._loss is not None:
            return
        if raw is None or raw.is_retired:  # first the others are completed
            return
        if flights and (self._is_draining or self._step.admission.leads_to_limit):
            return
        # after an error no further step is submitted until a run has raised it
        if all(each.stage >= _Stage.SUBMITTED and each.error is None for each in flights):
            self._begin(raw)

    def _begin(self, raw: RawSession) -> None:
        assert self._args is not None
        # waits for the step count as the worker's own, unless it moves the step meanwhile
        worker = None if self._flights else self._step.worker
        flight = _Flight(self._engine, self._args, raw, _StepOfRun(self._step, worker))
        flight.context.called_by = self._hooks_before
        ahead = self._flights[-1] if self._flights else None
        self._flights.append(flight)
        fly = self._fly_recorded if self._hooks.is_recorded else self._fly
        flight.task = self._engine.start(fly, flight, ahead)

    async def _fly_recorded(self, flight: _Flight, ahead: _Flight | None) -> None:
        with self._hooks.flight():
            await self._fly(flight, ahead)

    @holds_loop(lambda in_flight: in_flight._hooks_before.held_in_run())
    async def _fly(self, flight: _Flight, ahead: _Flight | None) -> None:
        """What the task of a run does: before_run, the submission, and the wait for results."""
        hooks, context, raw = self._hooks_before, flight.context, flight.raw
        merged = call = None
        has_entered, after = False, None
        try:
            for call, method, group in hooks.before_runs:
                hooks.current = call
                if group:
                    merged = await hooks.before_run_of_group(group, context, raw, merged)
                    continue
                request = await method(context)
                if request is not None:
                    merged = merged or MergedRun(raw, SessionRunArgs(()), None, hooks.hooks)
                    merged.add(call.place, call.hook, request)
            call = hooks.current = None
            flight.merged = merged
            feeds = None if merged is None else merged.finish(None)[1]
            await self._take_ticket(flight)
            raw.enter_run()
            has_entered, flight.stage = True, _Stage.SUBMITTING
            flight.awaited = raw.submit(feeds)
            flight.awaited = await flight.awaited
            flight.stage = _Stage.SUBMITTED
            self._top_up()
            flight.outputs, after = await flight.awaited
            flight.epoch = self._step.epoch
            if ahead is not None:
                await ahead.wait()  # steps count in their order
        except BaseException as error:
            failure = self._engine.failure_in(error)
            if failure is None:
                if context.is_given_up:
                    raise
                flight.is_cancelled = True
                flight.error = flight.explained = RuntimeError(
                    "the task of a step in flight was cancelled, and not by its session; cancel "
                    "the task that calls `session.run` instead"
                )
                raise
            explained = hooks.explained(failure, merged, call)
            flight.error, flight.explained = failure, self._stops.judge(explained, failure)
        finally:
            if flight.ticket is not None:
                self._step.admission.settle(flight.ticket, after)
            if after is not None:
                flight.context._is_made = True
                flight.after = self._step.value
            if has_entered:
                raw.leave_run()
            flight.complete()

    async def _take_ticket(self, flight: _Flight) -> None:
        """Wait for the run's turn: only now, as a wait for data must not hold up others."""
        admission = self._step.admission
        while True:
            while self._is_draining:
                flight.hold = Slot(self._engine, "what runs have put off")
                await self._engine.park(flight.hold)
            if flight.context.is_given_up:  # its cancellation is on the way
                raise StopTraining("the run was given up before its step was submitted")
            ticket = admission.take_ticket_nowait()
            if ticket is None:
                ticket = await admission.take_ticket(self._step.stop)
            if not (self._is_draining or flight.context.is_given_up):
                flight.ticket = ticket
                return
            admission.give_back(ticket)

    async def _land(self, flight: _Flight, args: RunArguments) -> Any:
        """Call after_run of the hooks with the results of a complete run; returns the caller's."""
        hooks, context, merged = self._hooks, flight.context, flight.merged
        try:
            if flight.error is not None:
                raise flight.error
            context._original_args = args
            outputs = flight.raw.pick(flight.outputs, args[0])
            values, results = hooks.unasked, _NO_RESULTS
            if merged is not None:
                _, results = merged.split(flight.raw.pick(flight.outputs, merged.fetches))
                values = merged.unasked()
            context.called_by, flight.step.after = hooks, flight.after
            for self._call, method, group in hooks.after_runs:
                hooks.current = self._call
                if group:
                    await hooks.after_run_of_group(group, context, values, results)
                else:
                    await method(context, values_of(self._call, values, results))
            self._call = hooks.current = None
        except BaseException:
            context.is_given_up = True
            raise
        finally:
            flight.step.after = None
        if context._pending is not None:
            self._pending.absorb(context._pending)
        context._pending = self._pending  # functions of its hooks may ask for more
        await self._look_at_pending()
        return outputs

    async def _look_at_pending(self) -> None:
        """Stop, if hooks asked for that; do what they put off, or stop submitting until then."""
        self._take_stop()
        self._is_draining = bool(self._pending.last)
        if self._loss is not None:  # not on what was lost
            return
        if self._is_draining and not any(each.is_out for each in self._flights):
            await self._finish_pending()

    async def _finish_pending(self) -> None:
        """Do what runs have put off, as nothing is in flight."""
        hooks, pending = self._hooks, self._pending
        try:
            while pending.last:
                self._call, last = pending.take()
                hooks.current = self._call
                await last()
            self._call = hooks.current = None
        finally:
            self._drop_pending()
        self._take_stop()

    def _drop_pending(self) -> None:
        """Let held runs go on; in a failed run nothing is done of what is left."""
        self._pending.last.clear()
        self._pending.end_exclusive()
        self._is_draining = False
        for each in self._flights:
            if each.hold is not None:
                each.hold.wake()

    def _take_stop(self) -> None:
        pending = self._pending
        reason, pending.stop_reason = pending.stop_reason, None
        if reason is not None:
            self._stops.request_by_hook(reason, pending.stops_all)

    def _explained(self, error: BaseException, flight: _Flight | None) -> BaseException:
        """What an error in a run becomes."""
        if flight is not None and flight.error is error and flight.explained is not None:
            return flight.explained
        if flight is None and self._call is None:  # no hook and no step has raised it
            return error
        merged = None if flight is None else flight.merged
        return self._stops.judge(self._hooks.explained(error, merged, self._call), error)

    async def finish(self, error: BaseException | None) -> BaseException | None:
        """The session ends: complete what is in flight, or give it up after an error.

        Returns the error that leaves.
        """
        self._is_closed = True
        if error is None:
            error = await interruption(self._finish_cleanly())
        first = error
        while self._flights:  # however often this task is cancelled meanwhile
            error = await interruption(self._give_up(first)) or error
        self._loss = None
        return first or error

    async def _finish_cleanly(self) -> None:
        flights = self._flights
        await self._end([each for each in flights if not each.is_out and each.error is None])
        first: BaseException | None = None
        while flights and first is None:
            await self._wait_for(flights[0])
            flight = flights.popleft()
            first = await self._failure_of(partial(self._land, flight, _NO_ARGS), flight)
        first = first or self._loss
        if first is None and self._is_draining:
            first = await self._failure_of(self._finish_pending, None)
        if first is not None:
            raise first

    async def _failure_of(
        self, fn: Callable[[], Awaitable[Any]], flight: _Flight | None
    ) -> BaseException | None:
        """What leaves the session's end; a StopTraining there is what it waits for anyhow."""
        self._call = None
        try:
            await fn()
        except BaseException as error:
            explained = self._explained(error, flight)
            return None if isinstance(explained, StopTraining) else explained
        return None

    async def _give_up(
        self, error: BaseException | None = None, keep: Collection[_Flight] = ()
    ) -> None:
        """Give up what is in flight, but for these; their errors become notes of this one."""
        self._args = None  # one that is just submitted begins no other
        flights = [each for each in self._flights if each not in keep]
        for each in flights:
            each.context.is_given_up = True  # before held ones go on
        self._drop_pending()
        await self._end(flights)
        for each in flights:
            also = each.error
            if error is not None and isinstance(also, Exception) and type(also) is not StopTraining:
                add_note(error, f"then, in a run in flight behind it: {also!r}")

    async def _end(self, flights: list[_Flight]) -> None:
        """Cancel these runs, and wait for their tasks, for the grace period at most."""
        for each in flights:
            each.context.is_given_up = True
            assert each.task is not None
            each.task.cancel()
        until = self._engine.now() + self._lifecycle.grace_secs
        with self._engine.shielded(math.inf):
            for each in flights:
                assert each.task is not None
                if not await each.task.wait(until):
                    logger.error("A step in flight did not end when it was cancelled: left alone")
                    if each.ticket is not None:
                        self._step.admission.abandon(each.ticket)
                if each in self._flights:
                    self._flights.remove(each)


def _is_end(flight: _Flight) -> bool:
    """Whether the input ended before its step, or a stop came."""
    return type(flight.explained) is StopTraining and flight.after is None


def refuse(in_flight: InFlight | None, call: str, instead: str) -> None:
    """Raise RuntimeError for what a session does not do with several steps in flight."""
    if in_flight is not None:
        raise RuntimeError(
            f"{call}() in a session with several steps in flight (in_flight of "
            f"FunctionSessionCreator): {instead}, or leave in_flight out"
        )
