"""Connection: a session's raw session and coordinator: created, lost, recreated, released.

It runs no step, and calls no hook but after_create_session.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from ._coordinator import Coordinator
from ._engine import STOPPED, Engine, Slot
from ._errors import PreemptionError, StopTraining, is_preemption
from ._hook import SessionRunValues
from ._hook_list import HookList
from ._raw_session import RawSession
from ._recovery import Recovery, Restart
from ._session_creator import Lease
from ._side_tasks import OnFailure, SideTask
from ._stop import EndsAtStop, Loss
from ._stop_reason import StopReason

logger = logging.getLogger("asynchooks")

T = TypeVar("T")


class Connection:
    """The raw session of one `MonitoredSession`, which makes it, with what stops it.

    A lost raw session takes its coordinator with it, and a stop that a hook asked for; what the
    caller asked for stays. Without `recovery` nothing counts as lost: errors leave.
    """

    __slots__ = (
        "_grace_secs", "_hooks", "_is_broken", "_is_closed", "_is_dropping", "_is_ready", "_lease",
        "_lost", "_recovery", "coord", "engine", "has_run", "hook_asked_stop", "raw", "ready",
        "session", "stops", "unasked",
    )  # fmt: skip

    def __init__(
        self,
        lease: Lease,
        hooks: HookList,
        recovery: Recovery | None,
        grace_secs: float,
    ) -> None:
        self._lease = lease
        lease.listener = self
        self._hooks = hooks
        self._recovery = recovery
        self._grace_secs = grace_secs
        self.engine: Engine  # the session sets it when it opens
        self.raw: RawSession | None = None
        self.coord: Coordinator | None = None
        self._lost: RawSession | None = None  # what the next raw session replaces
        # raw session and coordinator are of use: all hooks were told of them, none was lost
        self._is_ready = False
        # the raw session, if nothing needs to be done before it runs
        self.ready: RawSession | None = None
        self.session: Any = None  # that one, as hooks see it
        self.unasked = SessionRunValues(None, None, None)  # what a hook gets that asked for nothing
        self._is_dropping = False  # a lost one is being let go of, perhaps by a cancelled task
        self._is_broken = False  # recreating failed for good; the next run tries again
        self._is_closed = False
        self.hook_asked_stop = False
        self.has_run = False  # see `Owner`
        self.stops = hooks.stops
        self.stops.owner = self

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
        if self._is_broken or self.stops.is_asked:
            return True
        if self.coord is None or self._is_dropping or self._is_curable(self.coord.error):
            return False  # it is replaced at the next run, and what a hook asked for forgotten
        return self.hook_asked_stop or self.coord.should_stop()

    def raise_held(self) -> None:
        """Raise the error that the coordinator holds, if there is one."""
        if self.coord is not None:
            self.coord.raise_requested_exception()

    def _is_curable(self, error: BaseException | None) -> bool:
        return self._recovery is not None and is_preemption(error)

    def tell_coord(self, error: BaseException | None, reason: StopReason) -> None:
        if self.coord is not None:
            self.coord.request_stop(error, reason=reason)

    def start_soon(
        self, fn: SideTask, args: tuple[Any, ...], on_failure: OnFailure | Restart, name: str | None
    ) -> None:
        """Start a side task of the session, which outlives a lost raw session."""
        self.stops.start_soon(self._lease.drive_call, fn, args, on_failure, name)

    async def recovering(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make the attempt on a raw session; recreate a lost one and try again, within bounds.

        Raises:
            Exception: what the attempt raised, if recreating cannot cure it, or did not.
        """
        failures = 0
        while True:
            try:
                await self.drop_lost()
                return await attempt()
            except Exception as error:
                failures = await self.recover(error, failures)

    async def revive(self, *, is_nested: bool) -> RawSession:
        """Have a raw session for a run, a new one if the last was lost.

        Not within a step_fn: that has the old one in its hands, and is called again itself.

        Raises:
            RuntimeError: a hook has asked to stop.
        """
        if not is_nested:
            await self.drop_lost()
        raw = await self.create()
        if self.hook_asked_stop:
            raise RuntimeError(
                "Run called even after should_stop requested. "
                "Look at session.should_stop() before each run."
            )
        return raw

    def stop_by_hook(self, reason: StopReason | None) -> None:
        """A hook asked, in a run, that no further one begins; unless there is no reason."""
        if reason is not None:
            self.hook_asked_stop = True
            self.stops.note(reason)
            self.ready = None

    async def drop_lost(self) -> None:
        """Let go of a lost raw session, so that `create` makes a new one."""
        if self._recovery is not None and self.coord is not None and self._is_lost():
            await self._drop()

    async def recover(self, error: Exception, failures: int) -> int:
        """Prepare for the next attempt; returns how many have failed by now.

        Raises:
            Exception: the error, or what it led to, if recreating the session cannot cure it.
        """
        lost = error
        if self._recovery is None:
            raise error
        if not is_preemption(error):
            is_news = type(error) is StopTraining or self._hooks.own(error)
            if is_news or not self._was_replaced:
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
        return not self._is_ready or self._was_replaced or is_preempted

    async def acquire(self) -> RawSession:
        """Have a raw session; its hooks are not told yet."""
        if self.raw is not None:
            return self.raw
        lost, self._lost = self._lost, None
        restore = self._hooks.restore
        raw = await self._lease.acquire(self.engine, self._grace_secs, lost, restore)
        if self._is_closed:
            await self._lease.release(raw, self.engine, self._grace_secs)
            raise RuntimeError("the session was closed while a run recreated it")
        self.raw = raw
        return raw

    async def create(self) -> RawSession:
        """Have a raw session with a coordinator, of which all hooks were told."""
        if self._is_ready and self.raw is not None:
            self._look_again()
            return self.raw
        self._is_ready, self.ready = False, None
        try:
            raw = await self.acquire()
            coord = self.coord = self._lease.new_coordinator()
            coord.attach(self._on_change, self._drive_side_task)
            if self.stops.is_asked:
                coord.request_stop(self.stops.error, reason=self.stops.reason)
            self._lease.start_threads(raw, coord)
            await self._lease.drive(
                self._hooks.after_create_session(raw.exposed, coord), self._hooks.culprit
            )
        except BaseException as error:
            self._is_broken = isinstance(error, Exception) and not is_preemption(error)
            raise
        self._is_broken = False
        self._is_ready = True
        self.session = raw.exposed
        self.unasked = SessionRunValues(None, *raw.no_options)
        self._look_again()
        return raw

    def _look_again(self) -> None:
        """Runs need no more than the raw session, unless there is an error or a stop to look at."""
        self.ready = self.raw
        has_error = self.coord is not None and self.coord.error is not None
        if has_error or self.hook_asked_stop:  # looked at last: a thread may tell just now
            self.ready = None

    def judge(self, error: BaseException, raised: BaseException) -> BaseException:
        """The error that leaves a run: a preemption that the coordinator holds is its cause.

        Where the coordinator holds another error than the run's preemption, that one leaves when
        the session is dropped. Source: TensorFlow's `_CoordinatedSession.run`.

        Args:
            error: what came out of the run, explained.
            raised: what was raised, which becomes the cause of another one.
        """
        held = None if self.coord is None else self.coord.error
        is_cause = is_preemption(held) and not is_preemption(error)
        is_cause = is_cause and isinstance(error, Exception)
        if type(error) is StopTraining and (
            self.stops.stop.is_set or not self.stops.run_stop.is_set
        ):
            is_cause = False  # no wait that the preemption ended
        leaving = held if is_cause and isinstance(held, Exception) else error
        if leaving is not raised and leaving.__cause__ is None:
            leaving.__cause__ = raised
        return leaving

    async def catch_up(self) -> BaseException | None:
        """Have the successor of a shared session that another worker replaced, for `end`."""
        if not self._was_replaced:
            return None
        return await _interruption(self.recovering(self.create))

    def first_error(self, error: BaseException) -> BaseException:
        """The error that leaves: the coordinator's, if it holds one that is no preemption."""
        held = self.stops.failure
        if held is None:
            held = self.stops.error if self.coord is None else self.coord.error
            held = None if self._is_curable(held) else held
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
        if error is not None:
            return self.first_error(error)
        held = self.stops.error if coord is None else coord.error
        return self.stops.failure or (None if self._is_curable(held) else held)

    async def _end_tasks(self, until: float, *, cancel: bool) -> None:
        """Those of the raw session and its threads, and the session's own."""
        if self.coord is not None and not self.coord.joined:
            await self.coord.end(self.engine, until, cancel_tasks=cancel, loss=self._loss)
        await self.stops.end_tasks(self.engine, until, cancel=cancel)

    def report(self, error: BaseException | None) -> None:
        """An error leaves the session: note it, and tell the workers that share its creator."""
        if error is None:
            return
        self.stops.note(StopReason("the block", repr(error), error))
        if isinstance(error, (Exception, KeyboardInterrupt, SystemExit, BaseExceptionGroup)):
            self._lease.fail(StopReason("another worker", repr(error), error))

    def note_end(self, end: BaseException) -> None:
        """The block was left by what counts as a clean end."""
        self.stops.note(StopReason("the block", str(end) or repr(end)))

    def stop_for(self, reason: StopReason) -> None:
        """Another worker has failed: stop, without an error of one's own."""
        logger.warning("Stop requested, by %s", reason)
        self.stops.request(None, reason)

    async def release(self) -> None:
        """Give the raw session back, closed within the grace period."""
        raw = self.raw or self._lost
        self.raw = self._lost = self.coord = self.ready = self.session = None
        self._is_closed = self.stops.is_over = True
        self._lease.listener = None
        await self._lease.release(raw, self.engine, self._grace_secs)

    async def _recover_from(self, error: Exception, failures: int, recovery: Recovery) -> None:
        """Drop the raw session and wait as long as the next attempt should be waited for."""
        if failures > recovery.max_attempts or self._is_closed:
            self._is_broken = True
            self._is_ready, self.ready = False, None  # the next run tries again
            error.add_note(f"recreating the session was given up after {failures - 1} attempts")
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
                self._is_broken = True
                raise error

    async def _drop(self) -> None:
        """Let go of a lost raw session: join its threads and side tasks first.

        Raises:
            BaseException: the coordinator holds an error that is no preemption.
        """
        self._is_ready, self.ready = False, None
        coord = self.coord
        if coord is not None:
            self._is_dropping = True
            coord.detach()
            until = self.engine.now() + self._grace_secs
            await coord.end(self.engine, until, cancel_tasks=False, loss=self._loss)
            if coord.error is not None and not is_preemption(coord.error):
                self._is_dropping = False
                raise coord.error
        self._is_dropping = False
        self._lost = self.raw or self._lost
        self.raw = self.coord = None
        self.hook_asked_stop = False
        self.stops.forget()

    def _drive_side_task(self, task: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return self._lease.drive(task, _side_task)

    def _on_change(self, is_set: bool) -> None:
        """The coordinator was asked to stop, or its stop was cleared; in any thread."""
        coord = self.coord
        if coord is not None and coord.error is not None:
            self.ready = None
        if is_set:
            self.stops.note(None if coord is None else coord.stop_reason)
            is_curable = coord is not None and self._is_curable(coord.error)
            self.stops.set(for_runs_only=is_curable)
        else:
            self.stops.forget()


async def _interruption(awaitable: Awaitable[object]) -> BaseException | None:
    """Await it; returns what it raised."""
    try:
        await awaitable
    except GeneratorExit:  # the coroutine is being thrown away: nothing can be awaited any more
        raise
    except BaseException as error:
        return error
    return None


def _side_task() -> str:
    return "a side task"
