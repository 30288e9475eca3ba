"""SessionLifecycle: a session's raw session and coordinator: created, lost, recreated, released.

It runs no step, and calls no hook but restore_model and after_create_session.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from .._engine.base import STOPPED, Engine, Slot
from .._engine.stop import EndsAtStop, Loss, StopReason
from .._errors import (
    ModelRestored,
    PreemptionError,
    StopTraining,
    add_note,
    is_preemption,
    leaves_as_itself,
)
from .._hook import Pending, SessionRunValues
from .._step.waiters import Runs, Worker
from .._stopping.backoff import Recovery
from .._stopping.coordinator import Coordinator, Owner
from .._stopping.session_stop import SessionInput
from ..backends._creator import RestoredStep, SessionHandle
from ..backends._raw_session import RawSession
from .dispatch import HookList

logger = logging.getLogger("asynchooks")

T = TypeVar("T")


class State(Enum):
    """Where the raw session of a `MonitoredSession` stands."""

    ABSENT = auto()
    """There is none: none yet, or the last one was let go of."""
    CREATING = auto()
    """It is being created, or that failed in a way that recreating may cure."""
    READY = auto()
    """It is of use: all hooks have had after_create_session."""
    LOST = auto()
    """Its threads and side tasks are being joined, perhaps by a task that was cancelled then."""
    BROKEN = auto()
    """Recreating it failed for good: the session should stop; the next run tries again."""
    CLOSED = auto()
    """The session has ended."""


TRANSITIONS: dict[State, frozenset[State]] = {
    State.ABSENT: frozenset({State.CREATING, State.BROKEN, State.CLOSED}),
    State.CREATING: frozenset(
        {State.CREATING, State.READY, State.LOST, State.BROKEN, State.CLOSED}
    ),
    State.READY: frozenset({State.LOST, State.BROKEN, State.CLOSED}),
    State.LOST: frozenset({State.LOST, State.ABSENT, State.BROKEN, State.CLOSED}),
    State.BROKEN: frozenset({State.CREATING, State.LOST, State.BROKEN, State.CLOSED}),
    State.CLOSED: frozenset(),
}
"""Which state may follow which; any other change is a bug of asynchooks."""


class Outdated(Protocol):
    """Runs of the session, which may have to start over."""

    def outdate(self, one_run: Runs | None, hooks: HookList) -> None: ...


class SessionLifecycle(Owner):
    """The raw session of one `MonitoredSession`, which makes it, with what stops it.

    A lost raw session takes its coordinator with it, and a stop that a hook asked for; what the
    caller asked for stays. Without `recovery` nothing counts as lost: errors leave.
    """

    __slots__ = (
        "_grace_secs", "_handle", "_hooks", "_lost", "_recovery", "_state", "_thread", "_worker",
        "coord", "engine", "has_run", "raw", "raw_runs", "ready", "session", "stops", "unasked",
    )  # fmt: skip

    def __init__(
        self, handle: SessionHandle, hooks: HookList, recovery: Recovery | None, grace_secs: float
    ) -> None:
        self._handle = handle
        handle.listener = self
        self._hooks = hooks
        self._recovery = recovery
        self._grace_secs = grace_secs
        self._state = State.ABSENT
        self.engine: Engine  # the session sets it when it opens
        # both from the state CREATING on, and until they are let go of
        self.raw: RawSession | None = None
        self.coord: Coordinator | None = None
        self._thread = 0  # in which the raw session's call lock was joined
        self._lost: RawSession | None = None  # what the next raw session replaces
        # the raw session, if it is READY and there is neither a stop nor an error to look at
        self.ready: RawSession | None = None
        self.session: Any = None  # that one, as hooks see it
        self.unasked = SessionRunValues(None, None, None)  # what a hook gets that asked for nothing
        self.has_run = False  # see `session_stop.Owner`
        self.raw_runs: Outdated | None = None  # from opening on
        self._worker: Worker | None = None  # there while the session is open
        self.stops = hooks.stops
        self.stops.owner = self

    @property
    def state(self) -> State:
        return self._state

    def enter(self, state: State) -> None:
        """Change the state.

        Raises:
            RuntimeError: the session was closed meanwhile, perhaps by another task; or the change
                is none of `TRANSITIONS`.
        """
        if state not in TRANSITIONS[self._state]:
            if self._state is State.CLOSED:
                raise RuntimeError("the session was closed while a run recreated it")
            raise RuntimeError(
                f"a raw session that is {self._state.name} became {state.name}; expected one of "
                f"{sorted(each.name for each in TRANSITIONS[self._state])}. Please report it"
            )
        self._state = state
        self.ready = None

    def _break(self) -> None:
        """Recreating has failed for good."""
        if self._state is not State.CLOSED:
            self.enter(State.BROKEN)

    @property
    def exposed(self) -> Any:
        """The raw session as hooks see it, None if there is none."""
        return None if self.raw is None else self.raw.exposed

    @property
    def _loss(self) -> Loss | None:
        return None if self.raw is None else self.raw.loss

    @property
    def step_loss(self) -> Loss | None:
        """What ends the wait for a step in a thread: its backend's silence, else a guard."""
        return self._loss or (None if self.coord is None else self.coord.loss)

    def should_stop(self) -> bool:
        if self._state is State.BROKEN or self.stops.is_asked:
            return True
        is_lost = self._state is State.LOST
        if self.coord is None or is_lost or self._is_curable(self.coord.error):
            return False  # it is replaced at the next run, and what a hook asked for forgotten
        return self.stops.is_asked_by_hook or self.coord.should_stop()

    def raise_held(self) -> None:
        """Raise the error that the coordinator holds, if there is one."""
        if self.coord is not None:
            self.coord.raise_requested_exception()

    def _is_curable(self, error: BaseException | None) -> bool:
        return self._recovery is not None and is_preemption(error)

    def stop_coord(self, error: BaseException | None, reason: StopReason) -> None:
        if self.coord is not None:
            self.coord.request_stop(error, reason=reason)

    async def recovering(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make the attempt on a raw session; recreate a lost one and try again, within bounds.

        Raises:
            Exception: what the attempt raised, if recreating cannot cure it, or did not.
        """
        failures = 0
        while True:
            try:
                await self._drop_lost()
                return await attempt()
            except Exception as error:
                failures = await self.recover(error, failures)

    async def revive(self, *, is_nested: bool) -> RawSession:
        """Have a raw session for a run, a new one if the last was lost.

        Not within a step_fn: that has the old one in its hands, and is called again itself.

        Raises:
            StopTraining: a stop was asked for, which no recovery makes forgotten, or was asked for
                again while one took place.
        """
        if self.raw is not None and self.stops.is_asked:
            raise self._refusal()  # a session that is to end need not be recreated before
        if not is_nested:
            await self._drop_lost()
        raw = await self.create()
        if self._is_to_stop:
            raise self._refusal()
        return raw

    @property
    def _is_to_stop(self) -> bool:
        """Whether a stop was asked for, by a hook, through the coordinator, or by the caller."""
        if self.stops.is_asked_by_hook or self.stops.is_asked:
            return True
        coord = self.coord
        return coord is not None and coord.should_stop() and not self._is_curable(coord.error)

    def _refusal(self) -> StopTraining:
        coord, reason = self.coord, self.stops.reason
        if reason is None and coord is not None:  # a thread is just asking
            reason = coord.stop_reason
        return StopTraining(f"no run begins after a stop, by {reason}")

    def stop_by_hook(self, asked: Pending) -> None:
        """Let no further run begin, if a hook asked for that; the coordinator stops later."""
        reason = asked.stop_reason
        if reason is None:
            return
        self.stops.is_asked_by_hook = True
        if asked.stops_all:
            self.stops.is_asked = True
            reason = self.stop_workers(reason)
        self.stops.note(reason)
        self.ready = None

    def open_worker(self) -> Worker:
        """Count as one of the workers that share the model, which may all be stopped already."""
        step = self._handle.global_step
        worker = self._worker = step.open_worker(self.engine, self)
        if self.stops.is_for_all and self.stops.reason is not None:
            self.stop_workers(self.stops.reason)
        elif step.stop_reason is not None:
            self.stop_for(step.stop_reason)
        return worker

    def close_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._handle.global_step.close_worker(worker)

    def drop(self) -> None:
        """The session was dropped: the others that share the model go on without it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._handle.global_step.drop_worker(worker)
        self._handle.drop()

    def stop_workers(self, reason: StopReason) -> StopReason:
        """Stop the others that share the model; returns the first reason, which stands."""
        return self._handle.global_step.stop_workers(reason, self._worker)

    async def _drop_lost(self) -> None:
        """Let go of a lost raw session, so that `create` makes a new one."""
        if self._recovery is not None and self.coord is not None and self._is_lost():
            await self._drop()

    async def recover(self, error: Exception, failures: int) -> int:
        """Prepare for the next attempt; returns how many have failed by now.

        Raises:
            Exception: the error, or what it led to, if recreating the session cannot cure it.
        """
        lost = error
        if type(error) is ModelRestored:
            return failures
        if self._recovery is None:
            raise error
        if not is_preemption(error):
            is_final = type(error) is StopTraining or leaves_as_itself(error)
            if is_final or not self._was_replaced:
                raise error
            # another worker has closed it under this one's hook: whatever that made of it
            lost = PreemptionError(f"the shared session was replaced: {error!r}")
            lost.__cause__ = error
        await self._recover_from(lost, failures + 1, self._recovery)
        return failures + 1

    @property
    def _was_replaced(self) -> bool:
        """Whether another worker that shares the raw session has given it up."""
        return self.raw is not None and self.raw.is_retired

    def _is_lost(self) -> bool:
        is_preempted = self.coord is not None and is_preemption(self.coord.error)
        return self._state is not State.READY or self._was_replaced or is_preempted

    async def _acquire(self) -> RawSession:
        """Have a raw session, before after_create_session of hooks."""
        if self.raw is not None:
            return self.raw
        lost, self._lost = self._lost, None
        restore = self._restore if self._hooks.restore is not None else None
        raw = await self._handle.acquire(self.engine, self._grace_secs, lost, restore)
        if self._state is State.CLOSED:
            await self._handle.release(raw, self.engine, self._grace_secs)
            self.enter(State.CREATING)  # raises
        self.raw = raw
        self._thread = raw.call_lock.join(raw.global_step)
        return raw

    async def _restore(self, raw: RawSession) -> RestoredStep:
        restore = self._hooks.restore
        assert restore is not None
        step: RestoredStep = await self._handle.drive(restore(raw), self._hooks.culprit)
        return step

    async def create(self) -> RawSession:
        """Have a raw session with a coordinator, of use to all hooks."""
        if self._state is State.READY and self.raw is not None:
            self._look_again()
            return self.raw
        self.enter(State.CREATING)
        try:
            raw = await self._acquire()
            coord = self.coord = self._handle.new_coordinator()
            coord.attach(self)
            if self.stops.is_asked:
                coord.request_stop(self.stops.error, reason=self.stops.reason)
            self._handle.start_threads(raw, coord)
            await self._handle.drive(
                self._hooks.after_create_session(raw, coord), self._hooks.culprit
            )
        except BaseException as error:
            if isinstance(error, Exception) and not is_preemption(error):
                self._break()
            raise
        self.enter(State.READY)
        self.session = raw.exposed
        self.unasked = SessionRunValues(None, *raw.no_options)
        self._look_again()
        return raw

    def _look_again(self) -> None:
        """Runs need no more than the raw session, unless there is an error or a stop to look at."""
        self.ready = self.raw
        has_stopped = self.coord is not None and self.coord.should_stop()
        if has_stopped or self.stops.is_asked_by_hook or self.stops.is_asked:
            self.ready = None  # looked at last: a thread may ask just now

    def judge(self, error: BaseException, raised: BaseException) -> BaseException:
        """The error that leaves a run: a preemption that the coordinator holds is its cause.

        Where the coordinator holds another error than the run's preemption, that one leaves when
        the session is dropped. Source: TensorFlow's `_CoordinatedSession.run`.

        Args:
            error: what came out of the run, explained.
            raised: what was raised, which becomes the cause of another one.
        """
        held, stops, leaving = None if self.coord is None else self.coord.error, self.stops, error
        if is_preemption(held) and isinstance(error, Exception) and not is_preemption(error):
            # a preemption ends the waits of a run, and no other ones
            ended_wait = stops.run_stop.is_set and not stops.stop.is_set
            if isinstance(held, Exception) and (type(error) is not StopTraining or ended_wait):
                leaving = held
        if leaving is not raised and leaving.__cause__ is None:
            leaving.__cause__ = raised
        return leaving

    async def catch_up(self) -> BaseException | None:
        """Have the successor of a shared session that another worker replaced, for `end`."""
        if not self._was_replaced:
            return None
        return await _interruption(self.recovering(self.create))

    @property
    def _held(self) -> BaseException | None:
        """What leaves before any other error: a side task's, the coordinator's; no preemption."""
        held = self.stops.error if self.coord is None else self.coord.error
        return self.stops.failure or (None if self._is_curable(held) else held)

    def first_error(self, error: BaseException) -> BaseException:
        """The error that leaves: one that is held goes first."""
        held = self._held
        if held is None or held is error:
            return error
        held.__context__ = error
        return held

    async def end(self, error: BaseException | None) -> BaseException | None:
        """Stop side tasks and threads, within the grace period; returns what leaves.

        The coordinator's error goes before the one given; a preemption is only logged. However
        often this task is cancelled meanwhile, it goes on to the end.
        """
        coord, until = self.coord, self.engine.now() + self._grace_secs
        is_ended = coord is None and not self.stops.has_tasks
        if coord is not None:
            coord.detach()
        if self.stops.has_tasks:
            self.stops.stop.set()
        if error is None and not is_ended:
            error = await _interruption(self._end_tasks(until, cancel=False))
            is_ended = error is None
        is_cancelled = not isinstance(error, (Exception, type(None)))
        for cancel in (is_cancelled, True):
            if not is_ended:  # an anyio shield does not hold a native cancellation back
                with self.engine.shielded(math.inf):
                    again = await _interruption(self._end_tasks(until, cancel=cancel))
                error = error or again
                is_ended = again is None
        if coord is not None and self._is_curable(coord.error):
            logger.error("A preemption was reported while the session ended: %r", coord.error)
        return self._held if error is None else self.first_error(error)

    async def _end_tasks(self, until: float, *, cancel: bool) -> None:
        """Those of the raw session and its threads, and the session's own."""
        if self.coord is not None and not self.coord.joined:
            await self.coord.end(self.engine, until, cancel_tasks=cancel, loss=self._loss)
        await self.stops.end_tasks(self.engine, until, cancel=cancel)

    def report(self, error: BaseException | None) -> None:
        """An error leaves the session: note it, and stop the workers that share its creator."""
        if error is None:
            return
        reason = StopReason("the block", repr(error), error)
        self.stops.note(reason)
        if not isinstance(error, GeneratorExit) and self.engine.failure_in(error) is not None:
            noted = self.stops.reason
            self._handle.fail(noted if noted is not None and noted.error is error else reason)

    def note_end(self, end: BaseException) -> None:
        """The block was left by what counts as a clean end."""
        op = getattr(end, "op", None)  # TensorFlow's message holds the stack of where it was made
        why = (str(end) or repr(end)) if op is None else f"the input ended in {op.name!r}"
        self.stops.note(StopReason("the block", why))

    def model_restored(self) -> None:
        """Another worker has restored the model: a run that has not made its step starts over."""
        if self.raw_runs is not None and self._worker is not None:
            self.raw_runs.outdate(self._worker.runs, self._hooks)

    @property
    def input(self) -> SessionInput | None:
        """What loops in the body of the block read, if any do."""
        return self.stops.input

    def add_input(self, each: SessionInput) -> None:
        """Loops in the body of the block begin to read."""
        self._handle.add_input(each)

    @property
    def training(self) -> object:
        """The training that this session is part of, for comparison with others."""
        return self._handle.global_step.training

    def keep_open(self, close: Callable[[], Awaitable[None]]) -> bool:
        """Have an input closed by the last session that shares the creator; False: close it now."""
        return self._handle.keep_open(close)

    def stop_for(self, reason: StopReason) -> None:
        """Stop for what stops another worker, without an error of one's own."""
        if not self.stops.is_asked:
            level = logging.INFO if reason.error is None else logging.WARNING
            logger.log(level, "Stop requested, by %s", reason)
        self.stops.request(None, reason)

    def stop_all(self, reason: StopReason) -> None:
        """The coordinator was asked to stop all workers; in any thread."""
        self.stops.request(None, reason, all_workers=True)

    async def release(self) -> None:
        """Give the raw session back, closed within the grace period."""
        raw = self.raw or self._lost
        if self._state is not State.CLOSED:
            self.enter(State.CLOSED)
        self._leave_call_lock()
        self.raw = self._lost = self.coord = self.session = None
        self.stops.is_over = True
        self._handle.listener = None
        await self._handle.release(raw, self.engine, self._grace_secs)

    async def _recover_from(self, error: Exception, failures: int, recovery: Recovery) -> None:
        """Drop the raw session and wait as long as the next attempt should be waited for."""
        if failures > recovery.max_attempts or self._state is State.CLOSED:
            self._break()
            add_note(error, f"recreating the session was given up after {failures - 1} attempts")
            raise error
        pause = recovery.pause_before(failures)
        logger.warning(
            "The session was lost (%s: %s); recreating it, attempt %d of %d, in %g s",
            type(error).__name__, error, failures, recovery.max_attempts, pause,
        )  # fmt: skip
        await self._drop()
        if not pause:
            return
        slot = Slot(self.engine, "the next attempt to recreate the session")
        with EndsAtStop(slot, self.stops.stop):
            if await self.engine.park(slot, self.engine.now() + pause) is STOPPED:
                self._break()
                raise error

    async def _drop(self) -> None:
        """Let go of a lost raw session: join its threads and side tasks first.

        Raises:
            BaseException: the coordinator holds an error that is no preemption.
        """
        self.enter(State.LOST)
        coord = self.coord
        if coord is not None:
            coord.detach()
            until = self.engine.now() + self._grace_secs
            await coord.end(self.engine, until, cancel_tasks=False, loss=self._loss)
            if coord.error is not None and not is_preemption(coord.error):
                self._break()
                raise coord.error
        self.enter(State.ABSENT)
        self._leave_call_lock()
        self._lost = self.raw or self._lost
        self.raw = self.coord = None
        self.stops.is_asked_by_hook = False
        self.stops.forget()

    def _leave_call_lock(self) -> None:
        if self.raw is not None:
            self.raw.call_lock.leave(self.raw.global_step, self._thread)

    def drive(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]:
        """A coroutine of a side task, in what surrounds the session."""
        return self._handle.drive(coroutine, culprit)

    def stop_changed(self, is_set: bool) -> None:
        """The coordinator was asked to stop, or its stop was cleared; in any thread."""
        coord = self.coord
        self.ready = None  # the next run looks
        if is_set:
            is_curable = coord is not None and self._is_curable(coord.error)
            if coord is not None and not is_curable:
                self.stops.note(coord.stop_reason)
            self.stops.set(for_runs_only=is_curable)
        else:
            asked = self.stops.reason if self.stops.is_asked_by_hook else None
            self.stops.forget()
            self.stops.note(asked)


async def _interruption(awaitable: Awaitable[object]) -> BaseException | None:
    """Await it; returns what it raised."""
    try:
        await awaitable
    except GeneratorExit:  # the coroutine is being thrown away: nothing can be awaited any more
        raise
    except BaseException as error:
        return error
    return None
