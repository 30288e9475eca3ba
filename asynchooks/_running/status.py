"""What a session is doing, for people and services beside it: its status, and who follows it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from .. import _check
from .._engine.base import STOPPED, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, StopReason
from .._step.global_step import GlobalStep
from ..metrics._live import LiveMetrics
from .phase import Phase

_RATE_SECS = 10.0
"""The rate is that of the last seconds: of this many at most,"""
_SAMPLE_SECS = 0.5
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
    """The global step, as it was read last: asking takes no lock of the model."""
    limit: int | None
    """The step at which training ends; None without one."""
    steps_per_sec: float | None
    """Over the last ten seconds or so; None as long as nothing is known."""
    should_stop: bool
    """Whether the training loop is to end."""
    stop_reason: StopReason | None
    """Why, if it is known."""
    metrics: Mapping[str, float]
    """The newest value of each metric that a hook has read, or that was logged."""
    metrics_step: int | None
    """The step of the newest of them; None before the first."""

    def as_dict(self) -> dict[str, Any]:
        """The same in values of JSON; numbers that are not finite become None."""
        metrics = {name: _finite(value) for name, value in self.metrics.items()}
        return {
            "phase": self.phase,
            "step": self.step,
            "limit": self.limit,
            "steps_per_sec": self.steps_per_sec,
            "should_stop": self.should_stop,
            "stop_reason": None if self.stop_reason is None else str(self.stop_reason),
            "metrics": metrics,
            "metrics_step": self.metrics_step,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class HasStatus(Protocol):
    """A session, as its subscribers see it."""

    @property
    def stop_reason(self) -> StopReason | None: ...

    def should_stop(self) -> bool: ...

    def status(self) -> Status: ...


class StatusBoard:
    """Makes the statuses of one session, and gives them to its subscribers. From any thread."""

    def __init__(self, session: HasStatus, live: LiveMetrics) -> None:
        self._session = session
        self.live = live
        self._limit: int | None = None  # as it was known last
        self._lock = threading.Lock()  # guards the next two
        self._samples: deque[tuple[float, int]] = deque()  # times and steps
        self._subscriptions: tuple[Subscription, ...] = ()

    def status(self, phase: Phase, step: GlobalStep, now: float) -> Status:
        """The status now, in seconds on the session's engine."""
        session, live, value = self._session, self.live, step.last_known
        # the last session on a step takes its limit with it
        self._limit = limit = self._limit if step.limit is None else step.limit
        return Status(
            phase.name.lower(),  # type: ignore[arg-type]
            value,
            limit,
            self._rate(now, value) if phase is Phase.OPEN else None,
            session.should_stop(),
            session.stop_reason,
            live.latest,
            live.step,
        )

    def _rate(self, now: float, step: int) -> float | None:
        with self._lock:
            samples = self._samples
            if samples and step < samples[-1][1]:  # a recovery
                samples.clear()
            while len(samples) > 1 and samples[1][0] <= now - _RATE_SECS:
                samples.popleft()
            first = samples[0] if samples else None
            if not samples or now - samples[-1][0] >= _SAMPLE_SECS:
                samples.append((now, step))
        if first is None or now <= first[0]:
            return None
        return (step - first[1]) / (now - first[0])

    def add(self, subscription: Subscription) -> None:
        with self._lock:
            if not self._subscriptions:
                self.live.watchers += (self._take_metrics,)
            self._subscriptions += (subscription,)

    def discard(self, subscription: Subscription) -> None:
        with self._lock:
            rest = tuple(each for each in self._subscriptions if each is not subscription)
            self._subscriptions = rest

    def _take_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        self.notify()

    def notify(self) -> None:
        """The phase has changed, or there are new metrics."""
        for subscription in self._subscriptions:
            subscription.put(self._session.status())


class Subscription(AsyncIterator[Status]):
    """Statuses of a session, as they come: `session.subscribe` makes it; for one task at a time.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=10)], creator) as session:
            async for status in session.subscribe():
                print(status.step, status.metrics)
                break
    """

    def __init__(self, board: StatusBoard, session: HasStatus, every_secs: float) -> None:
        self.num_dropped = 0
        """Statuses that came while 64 others waited to be taken; each time the oldest left."""
        self._board, self._session = board, session
        self._every_secs = _check.seconds("every_secs", every_secs)
        self._statuses: deque[Status] = deque(maxlen=_MAX_STATUSES)
        self._slot: Slot | None = None
        self._is_over = False
        board.add(self)
        self.put(session.status())

    def put(self, status: Status) -> None:
        self.num_dropped += len(self._statuses) == _MAX_STATUSES
        self._statuses.append(status)
        slot = self._slot
        if slot is not None:
            slot.wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Status:
        if not self._statuses and not self._is_over:
            engine = current_engine()
            slot = self._slot = Slot(engine, "the next status")
            with EndsAtStop(slot, None):  # in a side task the session's
                if not self._statuses:
                    outcome = await engine.park(slot, engine.now() + self._every_secs)
                    self._is_over = self._is_over or outcome is STOPPED
        if self._is_over and not self._statuses:
            await self.aclose()
            raise StopAsyncIteration
        status = self._statuses.popleft() if self._statuses else self._session.status()
        if status.phase == "closed":
            await self.aclose()
        return status

    async def aclose(self) -> None:
        """End it: a task that waits for the next status gets none; cancellation safe."""
        self._is_over = True
        self._statuses.clear()
        self._board.discard(self)
        if self._slot is not None:
            self._slot.wake()
