"""What a session is doing, for people and services beside it: its status, and its subscriptions.

Everything here may be called from any thread, and nothing takes a lock: a list is changed and
copied in one piece, and a tuple replaced (under the GIL). The session is known by a weak reference,
and so are subscriptions, as clients of a service come and go: neither keeps the other alive.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, Self
from weakref import ref

from .. import _check
from .._engine.base import STOPPED, Engine, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop, StopReason
from .._step.global_step import GlobalStep
from .._stopping.session_stop import SessionStop
from ..metrics._live import LiveMetrics
from .phase import Phase

_RATE_SECS = 10.0
"""The rate is that of the last seconds: of this many at most,"""
_SAMPLE_SECS = 0.2
"""taken at most this often."""
_MAX_STATUSES = 64

PhaseName = Literal["new", "opening", "open", "closing", "closed"]


@dataclass(frozen=True, slots=True)
class Status:
    """What a session was doing at one moment. `session.status()` and `subscribe` make it.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=10)], creator) as session:
            await session.run("loss")
            status = session.status()
            assert (status.phase, status.step, status.limit) == ("open", 1, 10)
    """

    phase: PhaseName
    """"new" before it opens, "opening" until its hooks are ready, "open" while it trains,
    "closing" while hooks and side tasks end, "closed"."""
    step: int
    """The global step, as it was read last: asking never waits for the model. On a TensorFlow graph
    that is after each run if there is a limit, or a hook that looks at the step."""
    limit: int | None
    """The step at which training ends; None without one."""
    steps_per_sec: float | None
    """Over the last ten seconds, or since a status was last asked for, if that is longer ago. None
    at the first time, and unless the phase is "open"."""
    should_stop: bool
    """Whether the training loop is to end."""
    stop_reason: StopReason | None
    """Why, if it is known; `stop_reason.error` is the error that leaves the session, if any."""
    side_tasks: tuple[str, ...]
    """The names of the side tasks that are running, also of hooks: for these "closing" waits."""
    metrics: Mapping[str, float]
    """The newest value of each metric that a hook has read, or that was logged."""
    metrics_step: int | None
    """The step of the newest of them; None before the first."""

    @property
    def secs_left(self) -> float | None:
        """Seconds to the limit at the present rate; None where either is not known."""
        if self.limit is None or not self.steps_per_sec:
            return None
        return max(0, self.limit - self.step) / self.steps_per_sec

    def as_dict(self) -> dict[str, Any]:
        """The same in values of JSON, `secs_left` too, and "error", the text of the reason's error.

        Numbers that are not finite become None.
        """
        metrics = {name: _finite(value) for name, value in self.metrics.items()}
        reason = self.stop_reason
        error = None if reason is None else reason.error
        return {
            "phase": self.phase,
            "step": self.step,
            "limit": self.limit,
            "steps_per_sec": self.steps_per_sec,
            "secs_left": self.secs_left,
            "should_stop": self.should_stop,
            "stop_reason": None if reason is None else str(reason),
            "error": None if error is None else repr(error),
            "side_tasks": list(self.side_tasks),
            "metrics": metrics,
            "metrics_step": self.metrics_step,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class HasStatus(Protocol):
    """A session, as its subscriptions see it."""

    @property
    def stop_reason(self) -> StopReason | None: ...

    def should_stop(self) -> bool: ...

    def status(self) -> Status: ...


class HasMetrics(Protocol):
    """The hooks of a session, as its statuses see them."""

    stops: SessionStop

    @property
    def live(self) -> LiveMetrics: ...


class Rate:
    """How fast a count goes up, over the last seconds; where it goes back, it starts again.

    Any thread may ask, without a lock: of two at once, one's sample may be lost.
    """

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: tuple[tuple[float, int], ...] = ()  # times and counts

    def look(self, now: float, count: int) -> float | None:
        """Counts per second up to now; None as long as nothing is known."""
        samples = self._samples
        if samples and count < samples[-1][1]:  # a recovery
            samples = ()
        while len(samples) > 1 and samples[1][0] <= now - _RATE_SECS:
            samples = samples[1:]
        if not samples or now - samples[-1][0] >= _SAMPLE_SECS:
            samples = self._samples = (*samples, (now, count))
        then, before = samples[0]
        return (count - before) / (now - then) if now > then else None


class StatusBoard:
    """Makes the statuses of one session, and gives them to its subscriptions."""

    __slots__ = ("_limit", "_live", "_rate", "_session", "_stops", "_subscriptions")

    def __init__(self, session: HasStatus, hooks: HasMetrics) -> None:
        self._subscriptions: list[ref[Subscription]] = []
        dropped = partial(_wake_all, self._subscriptions)
        self._session = ref(session, dropped)
        self._stops, self._live = hooks.stops, hooks.live
        self._limit: int | None = None  # as it was known last
        self._rate = Rate()

    @classmethod
    def of(cls, session: HasStatus, hooks: HasMetrics, boards: list[StatusBoard]) -> StatusBoard:
        """The one of the session, the first in the list; made at the first use, by any thread."""
        if not boards:
            board = cls(session, hooks)
            boards.append(board)
            if boards[0] is board:  # else another thread's was there before
                give = partial(_give_status, board._session, board._subscriptions)
                board._live.watchers += (give,)
        return boards[0]

    def status(self, session: HasStatus, phase: Phase, step: GlobalStep, now: float) -> Status:
        """The status now, in seconds on the session's engine; called by the session."""
        live, value = self._live, step.last_known
        # the last session on a step takes its limit with it
        self._limit = limit = self._limit if step.limit is None else step.limit
        return Status(
            phase.name.lower(),  # type: ignore[arg-type]
            value,
            limit,
            self._rate.look(now, value) if phase is Phase.OPEN else None,
            session.should_stop(),
            session.stop_reason,
            self._stops.names_of_tasks(),
            live.latest,
            live.step,
        )

    def newest(self) -> Status | None:
        """The status now; None if the session was dropped."""
        session = self._session()
        return None if session is None else session.status()

    def stop_of_task(self, engine: Engine) -> Stop | None:
        """The session's stop, if the running task is the one that opened it, and has it open."""
        worker = self._stops.worker
        if worker is None or worker.task is None or worker.task is not engine.current_task():
            return None
        return self._stops.stop

    def add(self, subscription: Subscription) -> None:
        self._subscriptions.append(ref(subscription, partial(_forget, self._subscriptions)))

    def discard(self, subscription: Subscription) -> None:
        for each in list(self._subscriptions):
            if each() is subscription:
                self._subscriptions.remove(each)

    def notify(self) -> None:
        """The phase has changed."""
        _give_status(self._session, self._subscriptions)


def _forget(subscriptions: list[ref[Subscription]], gone: ref[Subscription]) -> None:
    """A subscription was dropped, perhaps after `discard`: by a thread that gave it a status."""
    with suppress(ValueError):
        subscriptions.remove(gone)


def _give_status(
    session: ref[HasStatus], subscriptions: list[ref[Subscription]], *_of_metrics: object
) -> None:
    """Something has changed."""
    if subscriptions and (now := session()) is not None:
        status = now.status()
        for each in list(subscriptions):
            if (subscription := each()) is not None:
                subscription.put(status)


def _wake_all(subscriptions: list[ref[Subscription]], _session: object) -> None:
    """The session was dropped."""
    for each in list(subscriptions):
        if (subscription := each()) is not None:
            subscription.wake()


class Subscription(AsyncIterator[Status]):
    """Statuses of a session, as they come: `session.subscribe` makes it; for one task at a time.

    It may be read on another event loop than the session's, in another thread. Cancellation safe:
    a status that was not returned is the next one. One that is dropped costs the session nothing
    more, so a loop over it may be left at any time.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=10)], creator) as session:
            async for status in session.subscribe():
                print(status.step, status.metrics)
                break
    """

    def __init__(self, board: StatusBoard, every_secs: float) -> None:
        self.num_dropped = 0
        """Statuses that came while 64 others waited to be taken; each time the oldest left."""
        self._board = board
        self._every_secs = _check.seconds("every_secs", every_secs)
        self._statuses: deque[Status] = deque(maxlen=_MAX_STATUSES)
        self._slot: Slot | None = None  # while a task waits
        self._is_over = False
        board.add(self)
        if (status := board.newest()) is not None:
            self.put(status)

    def put(self, status: Status) -> None:
        self.num_dropped += len(self._statuses) == _MAX_STATUSES
        self._statuses.append(status)
        self.wake()

    def wake(self) -> None:
        """Let the task that waits look again."""
        slot = self._slot
        if slot is not None:
            slot.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Status:
        engine = current_engine()
        stop = self._board.stop_of_task(engine)
        if self._statuses or self._is_over:
            await engine.turn()  # a thread that logs without a pause must not hold the loop
        else:
            await self._wait(engine, stop)
        if self._statuses:
            status: Status | None = self._statuses.popleft()
        else:
            status = None if self._is_over else self._board.newest()
        if status is None:
            await self.aclose()
            raise StopAsyncIteration
        if status.phase == "closed":
            await self.aclose()
        elif stop is not None and status.should_stop:
            self._is_over = True  # the session's end waits for this task
        return status

    async def _wait(self, engine: Engine, stop: Stop | None) -> None:
        """Wait for the next status, or until one is due."""
        if self._slot is not None:
            raise RuntimeError(
                "two tasks wait for the next status of one subscription; make one for each: "
                "session.subscribe()"
            )
        slot = self._slot = Slot(engine, "the next status")
        try:
            with EndsAtStop(slot, stop):  # in a side task the session's, in any case
                if not self._statuses and not self._is_over:
                    outcome = await engine.park(slot, engine.now() + self._every_secs)
                    self._is_over = self._is_over or outcome is STOPPED
        finally:
            self._slot = None

    async def aclose(self) -> None:
        """End it: a task that waits for the next status gets none; cancellation safe."""
        self._is_over = True
        self._statuses.clear()
        self._board.discard(self)
        self.wake()
