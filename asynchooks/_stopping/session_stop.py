"""Stop requests and side tasks of one session, and the error that leaves it.

It knows nothing of raw sessions. Its calls go down: to the coordinator, to the side tasks, and to
the other workers of the model. The coordinator reports the stops that others ask it for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from .._engine.base import Engine
from .._engine.stop import LostPeer, Stop, StopReason
from .._errors import StopTraining, add_note, is_preemption, is_thrown_away
from .._log import fields
from .._step.global_step import GlobalStep
from .._step.waiters import Worker
from .backoff import Recovery
from .coordinator import Coordinator, CoordinatorOwner
from .tasks import SideTasks

logger = logging.getLogger("asynchooks")


class Handle(Protocol):
    """The session's hold on its creator."""

    global_step: GlobalStep

    @property
    def savers(self) -> list[Any]: ...

    def note_item(self, stage: object) -> bool: ...

    async def wait_for_restore(self, stop: Stop | None) -> None: ...

    def keep_open(self, close: Callable[[], Awaitable[None]]) -> bool: ...

    def in_session_context(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]: ...

    def fail(self, reason: StopReason) -> None: ...


class SessionStop(CoordinatorOwner):
    """The stops of one `MonitoredSession`; its list of hooks makes it.

    Args:
        stop: what the session's waits end at: set by the caller and by the present coordinator.
    """

    __slots__ = (
        "_tasks", "coord", "error", "handle", "input", "is_asked", "is_asked_by_hook", "is_ending",
        "is_for_all", "is_over", "ready", "reason", "recovery", "run_stop", "stop", "task_error",
        "worker", "worker_number",
    )  # fmt: skip

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        # what waits in a run end at: also when a preemption is reported to the coordinator, by
        # which the run is to be made again
        self.run_stop = Stop()
        self.handle: Handle | None = None  # the session sets it; hooks of Keras's fit have none
        self.recovery: Recovery | None = None  # whether, and how, a lost raw session is recreated
        self.worker: Worker | None = None  # there while the session is open
        self.worker_number: int | None = None  # for the log; a ProtocolHook knows it
        self.coord: Coordinator | None = None  # of the present raw session
        # the raw session, if it is of use and there is neither a stop nor an error to look at
        self.ready: Any = None
        self.is_asked = False  # for good
        self.is_asked_by_hook = False  # which a recovery makes forgotten
        self.is_for_all = False  # by this session, for all that share its model
        self.is_ending = False  # no further run begins
        self.is_over = False
        self.error: BaseException | None = None  # the first of the caller's and the side tasks'
        self.task_error: BaseException | None = None  # the first of the session's own side tasks
        self.reason: StopReason | None = None  # the first request to stop
        self._tasks: SideTasks | None = None
        self.input: SessionInput | None = None  # of loops in the block; closed at the end

    @property
    def is_to_stop(self) -> bool:
        """Whether a stop was asked for; not one that recreating the raw session makes forgotten."""
        coord = self.coord
        if self.is_asked or coord is None or self.is_curable(coord.error):
            return self.is_asked
        return self.is_asked_by_hook or coord.should_stop()

    def is_curable(self, error: BaseException | None) -> bool:
        return self.recovery is not None and is_preemption(error)

    def request(
        self, error: BaseException | None, reason: StopReason, *, all_workers: bool = False
    ) -> None:
        """Stop for good: no recovery makes it forgotten; this session, or all of its model."""
        if all_workers:
            self.is_for_all = True  # first: it may be just opening
            reason = self._stop_workers(reason)
        self.is_asked = True
        if error is not None and (first := self._held) is not None and error is not first:
            add_note(first, f"then, in {reason.who}: {error!r}")
        self.error = self.error or error
        self.note(reason)
        self.ready = None
        self.stop.set()
        self.run_stop.set()
        self._stop_coord(error, reason)

    def _fail(self, error: BaseException, reason: StopReason) -> None:
        """A side task has failed."""
        self.task_error = self.task_error or error
        self.request(error, reason)

    def _stop_coord(self, error: BaseException | None, reason: StopReason | None) -> None:
        """A preemption that came in another way says nothing of the coordinator's raw session."""
        coord = self.coord  # the session may end meanwhile, in another thread
        if coord is not None:
            coord.record(None if self.is_curable(error) else error, reason)

    def request_by_hook(self, reason: StopReason, all_workers: bool) -> None:
        """Let no further run begin; the coordinator stops later."""
        self.is_asked_by_hook = True
        if all_workers:
            self.is_asked = True
            reason = self._stop_workers(reason)
        self.note(reason)
        self.ready = None

    def stop_for(self, reason: StopReason) -> None:
        """Stop for what stops another worker, without an error of one's own; from any thread."""
        if not self.is_asked:
            level = logging.INFO if reason.error is None else logging.WARNING
            logger.log(level, "Stop requested, by %s", reason, extra=self.log_fields(reason))
        self.request(None, reason)

    def log_fields(self, reason: object) -> dict[str, Any]:
        """For records about this session; the step as it is known, which reads nothing."""
        step = None if self.handle is None else self.handle.global_step.last_known
        return fields(step=step, worker=self.worker_number, reason=reason)

    def stop_all(self, reason: StopReason) -> None:
        self.request(None, reason, all_workers=True)

    def _stop_workers(self, reason: StopReason) -> StopReason:
        """Stop the others that share the model; returns the first reason, which stands."""
        if self.handle is None:
            return reason
        return self.handle.global_step.stop_workers(reason, self.worker)

    def note(self, reason: StopReason | None) -> None:
        """The first reason stands."""
        self.reason = self.reason or reason

    def note_clean_end(self, error: BaseException) -> None:
        """What ended the block cleanly."""
        op = getattr(error, "op", None)  # TensorFlow's message holds the stack of its making
        why = (str(error) or repr(error)) if op is None else f"the input ended in {op.name!r}"
        self.note(StopReason("the block", why))

    def forget(self) -> None:
        """Take back a stop that was not for good."""
        if not self.is_asked:
            self.reason = None
            self.stop.clear()
            self.run_stop.clear()

    def attach(self, coord: Coordinator) -> None:
        """The coordinator of a new raw session."""
        self.coord = coord
        coord.attach(self)
        if self.is_asked:
            self._stop_coord(self.error, self.reason)

    def stop_changed(self, is_set: bool) -> None:
        self.ready = None  # the next run looks
        coord = self.coord
        if not is_set:
            asked = self.reason if self.is_asked_by_hook else None
            self.forget()
            self.note(asked)
        elif coord is None or not self.is_curable(coord.error):
            self.note(None if coord is None else coord.stop_reason)
            self.stop.set()
        if is_set:
            self.run_stop.set()

    def open_worker(self, engine: Engine) -> Worker:
        """Count as one of the workers that share the model, which may all be stopped already."""
        assert self.handle is not None
        step = self.handle.global_step
        worker = self.worker = step.open_worker(engine, self)
        if self.is_for_all and self.reason is not None:
            self._stop_workers(self.reason)
        elif step.stop_reason is not None:
            self.stop_for(step.stop_reason)
        return worker

    def close_worker(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None and self.handle is not None:
            self.handle.global_step.close_worker(worker)

    def refusal(self) -> StopTraining:
        """What a run raises that would begin after a stop."""
        coord, reason = self.coord, self.reason
        if reason is None and coord is not None:  # a thread is just asking
            reason = coord.stop_reason
        return StopTraining(f"no run begins after a stop, by {reason}")

    def judge(self, error: BaseException, raised: BaseException) -> BaseException:
        """The error that leaves a run: a preemption that the coordinator holds is its cause.

        Where the coordinator holds another error than the run's preemption, that one leaves when
        the session is dropped. Source: TensorFlow's `_CoordinatedSession.run`.

        Args:
            error: what came out of the run, explained.
            raised: what was raised, which becomes the cause of another one.
        """
        held, leaving = None if self.coord is None else self.coord.error, error
        if is_preemption(held) and isinstance(error, Exception) and not is_preemption(error):
            # a preemption ends the waits of a run, and no other ones
            ended_wait = self.run_stop.is_set and not self.stop.is_set
            if isinstance(held, Exception) and (type(error) is not StopTraining or ended_wait):
                leaving = held
        if leaving is not raised and leaving.__cause__ is None:
            leaving.__cause__ = raised
        return leaving

    @property
    def _held(self) -> BaseException | None:
        """What leaves before any other error; a preemption of the raw session does not."""
        coord = self.coord
        held = None if coord is None else coord.error
        return self.error if held is None or self.is_curable(held) else held

    def first_error(self, error: BaseException | None) -> BaseException | None:
        """The error that leaves: one that is held goes first."""
        held = self._held
        if held is None or held is error:
            return error
        if error is not None:
            held.__context__ = error
        return held

    def report(self, error: BaseException | None, engine: Engine) -> None:
        """An error leaves the session: note it, and stop the workers that share its creator."""
        if error is None or self.handle is None:
            return
        reason = StopReason("the block", repr(error), error)
        self.note(reason)
        if not isinstance(error, GeneratorExit) and engine.failure_in(error) is not None:
            noted = self.reason
            self.handle.fail(noted if noted is not None and noted.error is error else reason)

    @property
    def tasks(self) -> SideTasks:
        """The side tasks of the session, which outlive a lost raw session."""
        if self._tasks is None:
            self._tasks = SideTasks(
                self.stop, self.in_session_context, self._fail,
                lambda: self.is_over, lambda: self.is_ending,
            )  # fmt: skip
        return self._tasks

    def names_of_tasks(self) -> tuple[str, ...]:
        """Of the side tasks that are running, also those of the coordinator; from any thread."""
        coord, tasks = self.coord, self._tasks
        running = () if tasks is None else tasks.names()
        return running if coord is None else running + coord.names_of_tasks()

    def in_session_context(
        self, coroutine: Coroutine[Any, Any, Any], culprit: Callable[[], str]
    ) -> Awaitable[Any]:
        handle = self.handle
        return coroutine if handle is None else handle.in_session_context(coroutine, culprit)

    async def end_tasks(
        self,
        error: BaseException | None,
        engine: Engine,
        grace_secs: float,
        lost_peer: LostPeer | None,
    ) -> BaseException | None:
        """Stop side tasks and threads, within the grace period; returns what leaves.

        An error that is held goes before the one given; a preemption is only logged. However
        often this task is cancelled meanwhile, it goes on to the end.
        """
        coord, until = self.coord, engine.now() + grace_secs
        if coord is not None:
            coord.detach()
        if self._tasks is not None:
            self.stop.set()
            self._tasks.cancel(all_tasks=False)  # not only once the coordinator's have ended
        is_ended = coord is None and self._tasks is None
        if error is None and not is_ended:
            error = await interruption(self._end_tasks(engine, until, lost_peer, cancel=False))
            is_ended = error is None
        cancel = not isinstance(error, (Exception, type(None)))
        while not is_ended:  # an anyio shield does not hold a native cancellation back
            with engine.shielded(math.inf):
                ending = self._end_tasks(engine, until, lost_peer, cancel=cancel)
                again = await interruption(ending)
            error = error or again
            is_ended = again is None or engine.failure_in(again) is not None
            cancel = True
        if coord is not None and self.is_curable(coord.error):
            logger.error(
                "A preemption was reported while the session ended: %r", coord.error,
                extra=self.log_fields(repr(coord.error)),
            )  # fmt: skip
        return self.first_error(error)

    async def _end_tasks(
        self, engine: Engine, until: float, lost_peer: LostPeer | None, *, cancel: bool
    ) -> None:
        """Those of the raw session and its threads, and the session's own."""
        if self.coord is not None and not self.coord.joined:
            await self.coord.end(engine, until, cancel_tasks=cancel, lost_peer=lost_peer)
        if self._tasks is not None:
            await self._tasks.end(engine, until, cancel=cancel)

    async def close_input(self, error: BaseException | None) -> BaseException | None:
        """The session has ended; returns what leaves it."""
        closing = None if self.input is None else await interruption(self.input.close())
        if closing is not None and error is not None:
            add_note(error, f"then, closing the input: {closing!r}")
        return error or closing


async def interruption(awaitable: Awaitable[object]) -> BaseException | None:
    """Await it; returns what it raised."""
    try:
        await awaitable
    except BaseException as error:
        if is_thrown_away(error):  # nothing can be awaited any more
            raise
        return error
    return None


class SessionInput(Protocol):
    """What the loops over `session.batches` in one session's block read."""

    async def close(self) -> None:
        """Let go of the sources."""
