"""What a session is doing, for people and services beside it: its status, and its subscriptions.

Everything here may be called from any thread, and nothing takes a lock: a list is changed and
copied in one piece, and a tuple replaced (under the GIL). The session is known by a weak reference,
and so are subscriptions, as clients of a service come and go: neither keeps the other alive.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self
from weakref import ref

from .. import _check
from .._engine.base import STOPPED, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, StopReason
from .._step.gate import Gate
from .hooks import HookList

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
    """Over the last ten seconds, or since a status was last asked for or the session opened, if
    that is longer ago. None unless the phase is "open"."""
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
        reason = self.stop_reason
        error = None if reason is None else reason.error
        return {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "secs_left": self.secs_left,
            "stop_reason": None if reason is None else str(reason),
            "error": None if error is None else repr(error),
            "side_tasks": list(self.side_tasks),
            "metrics": {
                name: value if math.isfinite(value) else None
                for name, value in self.metrics.items()
            },
        }


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
    """Makes the statuses of one session, and gives them to its subscriptions.

    It holds nothing that may hold the session: subscriptions hold it.
    """

    __slots__ = ("_limit", "_rate", "_session", "stop", "subscriptions")

    def __init__(self, session: Any, hooks: HookList) -> None:
        subscriptions: list[ref[Subscription]] = []
        self._session: ref[Any] = ref(session, lambda _: _give(subscriptions, None))
        self.stop = hooks.stop
        self.subscriptions = subscriptions
        self._limit: int | None = None  # as it was known last
        self._rate = Rate()
        hooks.live.watchers += (self.notify,)

    def begin(self, now: float, step: int) -> None:
        """The session has opened: the first rate is that since now."""
        self._rate.look(now, step)

    def status(self, session: Any, hooks: HookList, gate: Gate, now: float) -> Status:
        """The status now, in seconds on the session's engine; called by the session."""
        phase = session.phase  # first: the step of a session that is closed moves no more
        live, value = hooks.live, gate.value
        # the last session on a step takes its limit with it
        self._limit = limit = self._limit if gate.limit is None else gate.limit
        return Status(
            phase,
            value,
            limit,
            self._rate.look(now, value) if phase == "open" else None,
            session.should_stop(),
            session.stop_reason,
            self.stop.names_of_tasks(),
            live.latest,
            live.step,
        )

    def notify(self, *_of_metrics: object) -> None:
        """Something has changed: the phase, or a metric."""
        if self.subscriptions:
            _give(self.subscriptions, self.newest())

    def newest(self) -> Status | None:
        """The status now; None where the session was dropped."""
        session = self._session()
        return None if session is None else session.status()


def _give(subscriptions: list[ref[Subscription]], status: Status | None) -> None:
    for each in list(subscriptions):
        if (subscription := each()) is not None:
            subscription.put(status)


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
        self._is_over = False  # no further status is taken
        board.subscriptions.append(ref(self, board.subscriptions.remove))
        self.put(self._board.newest())

    def put(self, status: Status | None) -> None:
        """Take a status, and let the task that waits look; None where the session was dropped."""
        if status is not None and not self._is_over:
            self.num_dropped += len(self._statuses) == _MAX_STATUSES
            self._statuses.append(status)
        slot = self._slot
        if slot is not None:
            slot.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Status:
        if self._slot is not None:
            raise RuntimeError(
                "two tasks wait for the next status of one subscription; make one for each: "
                "session.subscribe()"
            )
        engine, worker = current_engine(), self._board.stop.worker
        task = None if worker is None else worker.task
        # the session's end waits for the task that opened it
        stop = self._board.stop if task is not None and task is engine.current_task() else None
        slot = self._slot = Slot(engine, "the next status")
        try:
            if self._statuses or self._is_over:
                await engine.turn()  # a thread that logs without a pause must not hold the loop
            else:
                with EndsAtStop(slot, stop):  # in a side task the session's, in any case
                    if await engine.park(slot, engine.now() + self._every_secs) is STOPPED:
                        self._is_over = True
        finally:
            self._slot = None
        if not self._statuses:
            self.put(self._board.newest())
        if not self._statuses:
            await self.aclose()
            raise StopAsyncIteration
        status = self._statuses.popleft()
        if status.phase == "closed":
            await self.aclose()
        elif stop is not None and status.should_stop:
            self._is_over = True
        return status

    async def aclose(self) -> None:
        """End it: a task that waits for the next status gets none; cancellation safe."""
        self._is_over = True
        self._statuses.clear()
        self.put(None)
