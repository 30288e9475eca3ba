"""ServerClient: one process's client of a parameter server elsewhere, for all its workers.

One blocked request brings all news, heartbeats say that the process is alive, and each worker sends
its own requests. The workers wait here.
"""

from __future__ import annotations

import itertools
import logging
import math
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from ..._engine.base import Engine, EngineTask, Slot
from ..._engine.stop import Stop
from ..._errors import StepSourceLostError, StopTraining
from ..._step.global_step import GlobalStep
from ..._step.remote import SourceState, StepSource
from ...protocols import ABANDONED, Snapshot
from .._membership import State
from ._calls import ActorCalls, ActorGoneError
from ._messages import Ending, News, Report, Welcome

logger = logging.getLogger("asynchooks")

_HEARTBEATS_PER_LEASE = 4
_LONGEST_INTERVAL_SECS = 10.0
_LEAST_ANSWER_SECS = 1.0
"""To wait for an answer, with any lease: a busy machine is not a lost one."""
_GIVE_UP_SECS = 10.0
"""How long neither server nor scheduler may answer, with any lease."""
_PAUSE_SECS = 0.2
"""Between two attempts to reach a server that was lost."""
_DISCONNECT_SECS = 2.0
"""How long a server may take to answer when this process leaves."""


class ServerView:
    """The newest state of the server that this process knows; the step follows it."""

    def __init__(self, step: GlobalStep) -> None:
        self._step = step
        self.known: State | None = None  # the newest state
        self._watchers: dict[Slot, int] = {}  # slot: the version that it works on
        self._watches = False  # `watch` was called: most likely again for the next version
        self.abandons_stale = False
        self.is_lost = False  # no news will come

    @property
    def state(self) -> State:
        """The newest one; there is one once the client is open."""
        assert self.known is not None
        return self.known

    def next_version(self, next_step: float) -> float:
        """The lowest version that concerns this process, whose tasks wait for `next_step`."""
        if self._watches and self.abandons_stale:
            return min(next_step, self.state.step + 1)
        return next_step

    def watch(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have the slot woken when work on a version becomes useless; returns what undoes this."""
        if self._is_useless(version):
            slot.wake(ABANDONED)
        self._watchers[slot] = version
        self._watches = True
        return lambda: self._watchers.pop(slot, None)

    def learn(self, state: State) -> None:
        """Apply a state; answers overtake each other."""
        known, step = self.known, self._step
        state = self.known = state if known is None else known.merged(state)
        demand = step.demand()
        # a limit that others have set holds for the sessions that are open; later ones get it
        # again, if it still holds
        if state.limit is not None and demand.workers_open and demand.limit != state.limit:
            step.raise_limit(state.limit)
        if known is not None and known.epoch != state.epoch:
            step.restart(state.step)
        else:
            step.publish(state.step)
        if state.is_closed and not (known is not None and known.is_closed):
            step.set_source_state(SourceState.CLOSED, "the parameter server was closed")
        self.abandon()

    def abandon(self) -> None:
        for slot, version in list(self._watchers.items()):
            if self.is_lost or self._is_useless(version):
                self._watchers.pop(slot, None)
                slot.wake(ABANDONED)

    def _is_useless(self, version: int) -> bool:
        known = self.state
        is_stale = version < known.step and self.abandons_stale
        return version > known.step or known.is_over or is_stale


class PendingWait(Slot):
    """A wait that was requested; its end may come before the answer that announces it."""

    __slots__ = ("number",)

    def __init__(self, engine: Engine, what: str, number: int) -> None:
        super().__init__(engine, what)
        self.number = number


class PendingWaits:
    """The waits of this process's workers that have not ended."""

    def __init__(self, engine: Engine, calls: ActorCalls, look_again: Callable[[], None]) -> None:
        self._engine = engine
        self._calls = calls
        self._look_again = look_again
        self._numbers = itertools.count(1)
        self._waits: dict[int, PendingWait] = {}
        self._released: list[int] = []  # from any thread
        self.received = 0
        """The number of the last ending that came."""

    @property
    def released(self) -> tuple[int, ...]:
        """The abandoned waits, until the server has them."""
        return tuple(self._released)

    def confirm(self, numbers: tuple[int, ...]) -> None:
        """The server has got these releases."""
        for number in numbers:
            if number in self._released:
                self._released.remove(number)

    def take(self, news: News) -> None:
        """Wake those that have ended."""
        self.received = max(self.received, news.received)
        for ending in news.endings:
            wait = self._waits.get(ending.wait)
            if wait is not None:
                wait.wake((ending, news.snapshot))

    def begin(self, what: str) -> PendingWait:
        wait = PendingWait(self._engine, what, next(self._numbers))
        self._waits[wait.number] = wait
        return wait

    async def end_of(
        self, wait: PendingWait, ending: Ending | None, snapshot: Snapshot | None, stop: Stop | None
    ) -> Snapshot | None:
        """Wait until a wait has ended; returns the parameters, if it was one to begin a step.

        Args:
            ending, snapshot: those of the answer; None: the end comes with news.

        Raises:
            StopTraining: the stop came first.
            StepSourceLostError: the server is lost for good.
            Exception: the protocol's.
        """
        if ending is None:
            try:
                ending, snapshot = await self._calls.park(wait, stop)
            except BaseException:
                self.release(wait)
                raise
        self._waits.pop(wait.number, None)
        if ending.error is not None:
            raise ending.error
        return snapshot

    def release(self, wait: PendingWait) -> None:
        """Abandon a wait; from any thread."""
        if self._waits.pop(wait.number, None) is not None:
            self._released.append(wait.number)
            self._look_again()


class ServerClient(StepSource):
    """One process's connection, for the event loop of its workers."""

    def __init__(self, calls: ActorCalls, step: GlobalStep, engine: Engine) -> None:
        self._calls = calls
        self._step = step
        self._engine = engine
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self.view = ServerView(step)
        self._sent: Report | None = None  # last
        self._sent_at = -math.inf
        self.waits = PendingWaits(engine, calls, self.look_again)
        self._look = Slot(engine, "something to report")
        self._is_closing = False
        self._lost_by: StepSourceLostError | None = None
        self._renewal = Stop()  # of the blocked request
        self._tasks: list[EngineTask] = []
        self.welcome: Welcome

    async def open(self, until: float) -> None:
        """Connect, and begin to receive news."""
        state, self.welcome = await self._calls.call(
            "connect", self._name, self._calls.place, until=until
        )
        self.view.abandons_stale = self.welcome.abandons_stale
        interval_secs = self.welcome.lease_secs / _HEARTBEATS_PER_LEASE
        self._interval_secs = min(interval_secs, _LONGEST_INTERVAL_SECS)
        self.view.learn(state)
        self._step.feed_from(self)
        self._tasks = [
            self._engine.start(self._keep, each) for each in (self._listen, self._send_heartbeats)
        ]

    async def aclose(self, reason: str) -> None:
        """Disconnect, within a bounded time; all waits end."""
        self._is_closing = True
        self._calls.lost_peer.report(lambda: StepSourceLostError(reason))
        self._look.wake()
        for task in self._tasks:
            await task.wait()
        self._calls.lost_peer.clear()
        try:
            if not self.view.is_lost:
                until = self._engine.now() + _DISCONNECT_SECS
                await self._calls.call("disconnect", self._name, until=until)
        except StepSourceLostError as error:
            logger.info("The server did not answer to the disconnect: %s", error)
        finally:
            self._calls.lost_peer.set()
            self._calls.cancel()
            self._step.set_source_state(SourceState.CLOSED, reason)
            self.view.is_lost = True
            self.view.abandon()

    async def ask(
        self,
        function: str,
        *args: Any,
        stop: Stop | None = None,
        wait: PendingWait | None = None,
        until: float = math.inf,
    ) -> Any:
        """Send a request, with a report; the state in the answer is applied.

        `wait` is one that begins by this: it is released if its answer comes too late.
        """
        report = self._report()
        self._sent, self._sent_at = report, self._engine.now()

        def late() -> None:
            if wait is not None:
                self.waits.release(wait)

        state, value = await self._calls.call(
            function, report, *args, stop=stop, until=until, when_late=late
        )
        self.waits.confirm(report.released)
        self.view.learn(state)
        return value

    def watch(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have the slot woken when work on a version becomes useless; returns what undoes this."""
        forget = self.view.watch(version, slot)
        self.look_again()
        return forget

    def look_again(self) -> None:
        self._look.wake()

    def _report(self) -> Report:
        demand = self._step.demand()
        next_step = self.view.next_version(demand.next_step)
        return Report(
            self._name, next(self._numbers), self.view.known, next_step, demand.limit,
            demand.workers_open > 0, self.waits.released, self.waits.received,
        )  # fmt: skip

    def _has_to_report(self) -> bool:
        sent, now = self._sent, self._report()
        if sent is None or now.released:
            return True
        is_lower = now.next_step < sent.next_step
        return is_lower or (now.limit, now.has_sessions) != (sent.limit, sent.has_sessions)

    async def _keep(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # an answer of another version, perhaps
            logger.exception("The parameter server gave an unexpected answer")
            self._give_up(f"the parameter server gave an unexpected answer: {error!r}")

    def _answer_by(self) -> float:
        """The time until which an answer must come."""
        return self._engine.now() + max(2 * self._interval_secs, _LEAST_ANSWER_SECS)

    async def _send_heartbeats(self) -> None:
        """Report changes, or else that this process is alive."""
        pause = self._interval_secs
        while not self._is_closing:
            slot = self._look = Slot(self._engine, "something to report")
            if not self._has_to_report():
                await self._engine.park(slot, self._sent_at + pause)
            if self._is_closing or not (
                self._has_to_report() or self._engine.now() >= self._sent_at + pause
            ):
                continue
            if self._lost_by is not None:  # `_listen` reconnects to the server
                await self._engine.park(slot, self._engine.now() + pause)
                continue
            try:
                await self.ask("report", until=self._answer_by())
            except StepSourceLostError as error:
                self._lost_by = error
                self._renewal.set()

    async def _listen(self) -> None:
        while not self._is_closing:
            self._renewal = Stop()
            try:
                news = await self.ask("events", stop=self._renewal)
            except StopTraining:
                await self._reconnect()
            except StepSourceLostError as error:
                self._lost_by = error
                await self._reconnect()
            else:
                self.waits.take(news)

    async def _reconnect(self) -> None:
        """Wait until the server answers again, or is lost for good."""
        lost_at = self._engine.now()
        while not self._is_closing and self._lost_by is not None:
            self._step.set_source_state(SourceState.LOST, str(self._lost_by))
            if isinstance(self._lost_by, ActorGoneError):
                return self._give_up(str(self._lost_by))
            try:
                if await self._calls.is_gone(self._answer_by()):
                    return self._give_up(
                        f"{self._calls.where} is gone: its worker has left the cluster"
                    )
            except StepSourceLostError as error:  # the network may be cut; not for ever
                if self._engine.now() >= lost_at + max(self.welcome.lease_secs, _GIVE_UP_SECS):
                    return self._give_up(
                        f"{self._calls.where} is lost, and so is the scheduler: {error}"
                    )
            pause = Slot(self._engine, "the next attempt to reach the server")
            await self._engine.park(pause, self._engine.now() + _PAUSE_SECS)
            try:
                await self.ask("report", until=self._answer_by())
            except StepSourceLostError as error:
                self._lost_by = error
            else:
                self._lost_by = None
        if not self._is_closing and not self.view.state.is_closed:
            self._step.set_source_state(SourceState.LIVE)
        return None

    def _give_up(self, reason: str) -> None:
        if self._is_closing:
            return
        self._is_closing = self.view.is_lost = True
        self._calls.lost_peer.report(lambda: StepSourceLostError(reason))
        self._step.set_source_state(SourceState.CLOSED, reason)
        self.view.abandon()
        self._look.wake()
