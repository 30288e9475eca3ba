"""SessionLifecycle: a session's raw session and coordinator: created, lost, recreated, ended.

It runs no step. Stops and the errors that they leave by: `_stopping/session_stop.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from .._engine.base import STOPPED, Engine, Slot
from .._engine.stacks import holds_loop
from .._engine.stop import EndsAtStop, LostPeer
from .._errors import (
    PreemptionError,
    StopTraining,
    add_note,
    is_preemption,
    is_stop,
    leaves_as_itself,
    leaves_of,
    shorten_traceback,
)
from .._hook import SessionRunValues
from .._stopping.backoff import Recovery
from .._stopping.session_stop import interruption
from ..backends._creator import SessionHandle, close_raw
from ..backends._raw_session import RawSession
from .dispatch import HookList
from .phase import OneRun

logger = logging.getLogger("asynchooks")

T = TypeVar("T")


class State(Enum):
    """Where the raw session of a `MonitoredSession` stands."""

    ABSENT = auto()  # there is none: none yet, or the last one was let go of
    CREATING = auto()  # or that failed in a way that recreating may cure
    READY = auto()  # of use: all hooks have had after_create_session
    LOST = auto()  # threads and side tasks are being joined, perhaps by a task cancelled then
    BROKEN = auto()  # recreating it failed for good: the session should stop; a run tries again
    CLOSED = auto()


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


class RunsInFlight(Protocol):
    """The runs of a session with steps in flight."""

    @property
    def has_results(self) -> bool: ...

    async def finish(self, error: BaseException | None) -> BaseException | None: ...


class SessionLifecycle:
    """The raw session of one `MonitoredSession`, which makes it.

    A lost raw session takes its coordinator with it, and a stop that a hook asked for; what the
    caller asked for stays. Without `recovery` nothing counts as lost: errors leave.
    """

    __slots__ = (
        "_handle", "_has_ended", "_lost", "_state", "_thread", "engine", "grace_secs", "hooks",
        "in_flight", "raw", "stops",
    )  # fmt: skip

    def __init__(
        self, handle: SessionHandle, hooks: HookList, recovery: Recovery | None, grace_secs: float
    ) -> None:
        self._handle = handle
        self.hooks = hooks
        self.grace_secs = grace_secs
        self._state = State.ABSENT
        self._has_ended = False  # a run has said so
        self.engine: Engine  # the session sets it when it opens
        self.raw: RawSession | None = None  # from the state CREATING on, until it is let go of
        self._thread = 0  # in which the raw session's call lock was joined
        self._lost: RawSession | None = None  # what the next raw session replaces
        self.in_flight: RunsInFlight | None = None  # where several steps may be under way
        self.stops = hooks.stops
        self.stops.handle = handle
        handle.stop_for = self.stops.stop_for
        self.stops.recovery = recovery

    @property
    def state(self) -> State:
        return self._state

    def enter(self, state: State) -> None:
        """Change the state; RuntimeError where the session was closed meanwhile."""
        if state not in TRANSITIONS[self._state]:
            if self._state is State.CLOSED:
                raise RuntimeError("the session was closed while a run recreated it")
            raise RuntimeError(
                f"a raw session that is {self._state.name} became {state.name}; expected one of "
                f"{sorted(each.name for each in TRANSITIONS[self._state])}. Please report it"
            )
        self._state = state
        self.stops.ready = None

    def _break(self) -> None:
        """Recreating has failed for good."""
        if self._state is not State.CLOSED:
            self.enter(State.BROKEN)

    @property
    def exposed(self) -> Any:
        """The raw session as hooks see it, None if there is none."""
        return None if self.raw is None else self.raw.exposed

    @property
    def _lost_peer(self) -> LostPeer | None:
        return None if self.raw is None else self.raw.lost_peer

    @property
    def lost_step(self) -> LostPeer | None:
        """What ends the wait for a step in a thread: its backend's silence, else a guard."""
        coord = self.stops.coord
        return self._lost_peer or (None if coord is None else coord.lost_step)

    def should_stop(self) -> bool:
        if self._state is State.LOST:
            return self.stops.is_asked  # it is replaced at the next run
        return self._state is State.BROKEN or self.stops.is_to_stop

    @property
    def has_results(self) -> bool:
        """Whether runs are still to return results of steps in flight."""
        return self.in_flight is not None and self.in_flight.has_results

    async def recovering(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make the attempt on a raw session; recreate a lost one and try again, within bounds."""
        failures = 0
        while True:
            try:
                await self._drop_lost()
                return await attempt()
            except Exception as error:
                failures = await self.recover(error, failures)

    async def revive(self, *, is_nested: bool) -> RawSession:
        """Have a raw session for a run, a new one if the last was lost; StopTraining after a stop.

        Not within a step_fn: that has the old one in its hands, and is called again itself.
        """
        if self.raw is not None and self.stops.is_asked:
            raise self.stops.refusal()  # a session that is to end need not be recreated before
        if not is_nested:
            await self._drop_lost()
        raw = await self.create()
        if self.stops.is_asked_by_hook or self.stops.is_to_stop:
            raise self.stops.refusal()
        return raw

    def drop(self) -> None:
        """The session was dropped: the others that share the model go on without it."""
        worker, self.stops.worker = self.stops.worker, None
        if worker is not None:
            self._handle.global_step.drop_worker(worker)
        self._handle.drop()

    async def _drop_lost(self) -> None:
        """Let go of a lost raw session, so that `create` makes a new one."""
        coord = self.stops.coord
        if self.stops.recovery is None or coord is None:
            return
        if self._state is not State.READY or self.was_replaced or is_preemption(coord.error):
            await self._drop()

    @holds_loop(lambda lifecycle: "the session")
    async def leaving(
        self, error: BaseException, failures: int, one_run: OneRun
    ) -> BaseException | None:
        """Prepare a failed run for its next attempt; returns what leaves if there is none.

        A step_fn is called again itself, not the runs in it.
        """
        if type(error) is StopTraining:
            has_ended, self._has_ended = self._has_ended, True
            if has_ended:  # a loop that swallows it would hold the event loop for ever
                await self.engine.checkpoint()
        leaving, traceback = error, error.__traceback__
        if isinstance(error, Exception) and not one_run.is_in_step_fn:
            try:
                await self.recover(error, failures)
            except BaseException as final:
                leaving = final
            else:
                return None
        if leaving is error:  # without the places that raised it again
            error.__traceback__ = traceback
        shorten_traceback(leaving)
        return leaving

    async def recover(self, error: Exception, failures: int) -> int:
        """Let go of the raw session, and wait until the next attempt is due.

        Returns:
            How many attempts have failed by now.

        Raises:
            Exception: the error, or what it led to, if recreating the session cannot cure it.
        """
        recovery, lost = self.stops.recovery, error
        if recovery is None:
            raise error
        if not is_preemption(error):
            is_final = is_stop(error) or leaves_as_itself(error)
            if is_final or not self.was_replaced:
                raise error
            # another worker has closed it under this one's hook: whatever that made of it
            lost = PreemptionError(f"the shared session was replaced: {error!r}")
            lost.__cause__ = error
        failures += 1
        if failures > recovery.max_attempts or self._state is State.CLOSED:
            self._break()
            add_note(lost, f"recreating the session was given up after {failures - 1} attempts")
            raise lost
        pause = recovery.pause_before(failures)
        causes = dict.fromkeys(f"{type(each).__name__}: {each}" for each in leaves_of(lost))
        logger.warning(
            "The session was lost (%s); recreating it, attempt %d of %d, in %g s",
            "; ".join(causes), failures, recovery.max_attempts, pause,
            extra=self.stops.log_fields(repr(lost)),
        )  # fmt: skip
        await self._drop()
        if pause:
            slot = Slot(self.engine, "the next attempt to recreate the session")
            with EndsAtStop(slot, self.stops.stop):
                if await self.engine.park(slot, self.engine.now() + pause) is STOPPED:
                    self._break()
                    raise lost
        return failures

    @property
    def was_replaced(self) -> bool:
        """Whether another worker that shares the raw session has given it up."""
        return self.raw is not None and self.raw.is_retired

    async def _acquire(self) -> RawSession:
        """Have a raw session, before after_create_session of hooks."""
        if self.raw is not None:
            return self.raw
        lost, self._lost = self._lost, None
        restores = self.hooks.restores(self.call_hooks)
        raw = await self._handle.acquire(self.engine, self.grace_secs, lost, restores)
        if self._state is State.CLOSED:
            await self._handle.release(raw, self.engine, self.grace_secs)
            self.enter(State.CREATING)  # raises
        self.raw = raw
        self._thread = raw.call_lock.join(raw.global_step)
        return raw

    def call_hooks(self, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """What calls hooks, in what surrounds the session."""
        return self._handle.in_session_context(coroutine, self.hooks.culprit)

    async def create(self) -> RawSession:
        """Have a raw session with a coordinator, of use to all hooks."""
        if self._state is State.READY and self.raw is not None:
            self._look_again()
            return self.raw
        self.enter(State.CREATING)
        try:
            raw = await self._acquire()
            coord = self._handle.new_coordinator()
            self.stops.attach(coord)
            self._handle.start_threads(raw, coord)
            await self.call_hooks(self.hooks.after_create_session(raw, coord))
        except BaseException as error:
            if isinstance(error, Exception) and not is_preemption(error):
                self._break()
            raise
        self.enter(State.READY)
        self.hooks.session = raw.exposed
        self.hooks.unasked = SessionRunValues(None, *raw.no_options)
        self._look_again()
        return raw

    def _look_again(self) -> None:
        """Runs need no more than the raw session, unless there is an error or a stop to look at."""
        stops, coord = self.stops, self.stops.coord
        stops.ready = self.raw
        if stops.is_asked or stops.is_asked_by_hook or (coord is not None and coord.should_stop()):
            stops.ready = None  # looked at last: a thread may ask just now

    async def end(self, error: BaseException | None) -> BaseException | None:
        """End hooks, tasks, threads and the raw session; returns what must leave."""
        stops, engine = self.stops, self.engine
        if self.in_flight is not None:
            error = await self.in_flight.finish(error)
        stops.report(error, engine)
        if error is None and self.was_replaced:  # hooks get the successor
            error = await interruption(self.recovering(self.create))
        session = self.exposed
        if error is None:
            error = await self._end_hooks(session)
        if error is not None:
            error = stops.first_error(error)
        reported = error
        stops.report(error, engine)
        error = await self._call_on_error(session, reported) or error
        error = await stops.end_tasks(error, engine, self.grace_secs, self._lost_peer)
        stops.report(error, engine)
        if reported is None:
            reported = error
            error = await self._call_on_error(session, reported) or error
        interrupted = await interruption(self._release())
        error = error or interrupted
        if reported is None:
            error = await self._call_on_error(None, error) or error
        return error

    async def _end_hooks(self, session: Any) -> BaseException | None:
        """Call before_end and end of hooks; returns the first error."""
        raw = self.raw
        try:
            if raw is not None:
                raw.enter_run()  # no worker that shares it closes it meanwhile
            try:
                first = await self.call_hooks(self.hooks.end(session))
            finally:
                if raw is not None and raw.leave():
                    await close_raw(raw, self.engine, self.grace_secs)
        except BaseException as error:  # of what surrounds the hooks
            return error
        return first

    async def _call_on_error(
        self, session: Any, error: BaseException | None
    ) -> BaseException | None:
        """Call on_error of hooks, if there is an error; returns what interrupted that."""
        if error is None:
            return None
        calls = self.hooks.on_error(session, error, self.engine, self.grace_secs)
        return await interruption(self.call_hooks(calls))

    async def _release(self) -> None:
        """Give the raw session back, closed within the grace period."""
        raw = self.raw or self._lost
        if self._state is not State.CLOSED:
            self.enter(State.CLOSED)
        self._leave_call_lock()
        self.raw = self._lost = self.stops.coord = self.hooks.session = None
        self.stops.is_over = True
        await self._handle.release(raw, self.engine, self.grace_secs)

    async def _drop(self) -> None:
        """Join its threads and side tasks; raise what the coordinator holds, if no preemption."""
        self.enter(State.LOST)
        coord = self.stops.coord
        if coord is not None:
            coord.detach()
            until = self.engine.now() + self.grace_secs
            await coord.end(self.engine, until, cancel_tasks=False, lost_peer=self._lost_peer)
            # an error of a side task of the session leaves at the end, after all hooks' `end`
            error = None if coord.error is self.stops.task_error else coord.error
            if error is not None and not is_preemption(error):
                self._break()
                raise error
        self.enter(State.ABSENT)
        self._leave_call_lock()
        self._lost = self.raw or self._lost
        self.raw = self.stops.coord = None
        self.stops.is_asked_by_hook = False
        self.stops.forget()

    def _leave_call_lock(self) -> None:
        if self.raw is not None:
            self.raw.call_lock.leave(self.raw.global_step, self._thread)
