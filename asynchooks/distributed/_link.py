"""Link: what one process keeps up with a parameter server elsewhere, for all its workers.

One blocked request brings all news; the workers wait here. Beside it goes a heartbeat, and what a
worker asks for itself. It knows no protocol.
"""

from __future__ import annotations

import itertools
import logging
import math
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from .._engine import Engine, EngineTask, Slot
from .._errors import StepSourceLostError, StopTraining
from .._global_step import GlobalStep
from .._step_source import SourceState, StepSource
from .._stop import Stop
from ._actor_calls import ActorCalls, ActorGoneError
from ._knowledge import Knowledge
from ._messages import Report, Welcome
from ._pending_waits import PendingWait, PendingWaits

logger = logging.getLogger("asynchooks")

_BEATS_PER_LEASE = 4
_LONGEST_BEAT_SECS = 10.0
_LEAST_PATIENCE_SECS = 1.0
"""With an answer, whatever the lease: a busy machine is not a lost one."""
_LEAST_LOSS_SECS = 10.0
"""How long neither server nor scheduler may answer, whatever the lease."""
_PAUSE_SECS = 0.2
"""Between two attempts to reach a server that was lost."""
_FAREWELL_SECS = 2.0
"""How long a server may take to hear that this process leaves."""


class Link(StepSource):
    """One process's connection; a `RemoteParameterServer` makes it, opens it and closes it.

    Args:
        calls: to the host's actor.
        step: is fed from there.
        engine: of the workers' event loop.
    """

    def __init__(self, calls: ActorCalls, step: GlobalStep, engine: Engine) -> None:
        self._calls = calls
        self._step = step
        self._engine = engine
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self.knowledge = Knowledge(step)
        self._said: Report | None = None  # last
        self._said_at = -math.inf
        self.waits = PendingWaits(engine, calls.loss, self.look_again)
        self._look = Slot(engine, "something to report")
        self._is_closing = False
        self._loss: StepSourceLostError | None = None
        self._renewal = Stop()  # of the blocked request
        self._tasks: list[EngineTask] = []
        self.welcome: Welcome

    async def open(self, until: float) -> None:
        """Connect, and begin to hear news.

        Raises:
            StepSourceLostError: the server cannot be reached.
        """
        state, self.welcome = await self._calls.call(
            "connect", self._name, self._calls.place, until=until
        )
        self.knowledge.abandons_stale = self.welcome.abandons_stale
        self.knowledge.learn(state)
        self._step.feed_from(self)
        self._tasks = [self._engine.start(self._keep, each) for each in (self._listen, self._beat)]

    async def aclose(self, reason: str) -> None:
        """Say farewell, for a bounded time; all waits end."""
        self._is_closing = True
        self._calls.loss.report(lambda: StepSourceLostError(reason))
        self._look.wake()
        for task in self._tasks:
            await task.wait()
        self._calls.loss.clear()
        try:
            if not self.knowledge.is_lost:
                until = self._engine.now() + _FAREWELL_SECS
                await self._calls.call("disconnect", self._name, until=until)
        except StepSourceLostError as error:
            logger.info("The farewell was not heard: %s", error)
        finally:
            self._calls.loss.set()
            self._calls.cancel()
            self._step.set_source_state(SourceState.CLOSED, reason)
            self.knowledge.is_lost = True
            self.knowledge.abandon()

    async def ask(
        self,
        function: str,
        *args: Any,
        stop: Stop | None = None,
        wait: PendingWait | None = None,
        until: float = math.inf,
    ) -> Any:
        """Ask the server for something, with a report; what else it says is taken note of.

        `wait` is one that begins by this: it is released if its answer comes too late.
        """
        report = self._report()
        self._said, self._said_at = report, self._engine.now()
        late = None if wait is None else lambda: self.waits.release(wait)
        state, value = await self._calls.call(
            function, report, *args, stop=stop, until=until, when_late=late
        )
        self.waits.told(report.released)
        self.knowledge.learn(state)
        return value

    def watch(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have the slot woken when work on a version becomes useless; returns what forgets it."""
        forget = self.knowledge.watch(version, slot)
        self.look_again()
        return forget

    def look_again(self) -> None:
        self._look.wake()

    def _report(self) -> Report:
        demand = self._step.demand()
        next_step = self.knowledge.next_version(demand.next_step)
        return Report(
            self._name, next(self._numbers), self.knowledge.if_any, next_step, demand.limit,
            demand.workers_open > 0, self.waits.released, self.waits.received,
        )  # fmt: skip

    def _has_to_report(self) -> bool:
        said, now = self._said, self._report()
        if said is None or now.released:
            return True
        is_lower = now.next_step < said.next_step
        return is_lower or (now.limit, now.has_sessions) != (said.limit, said.has_sessions)

    async def _keep(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # what no answer should be: of another version, perhaps
            logger.exception("The parameter server gave an answer that is none")
            self._give_up(f"the parameter server's answer was not understood: {error!r}")

    @property
    def _beat_secs(self) -> float:
        return min(self.welcome.lease_secs / _BEATS_PER_LEASE, _LONGEST_BEAT_SECS)

    def _patience(self) -> float:
        """Until when an answer has to come."""
        return self._engine.now() + max(2 * self._beat_secs, _LEAST_PATIENCE_SECS)

    async def _beat(self) -> None:
        """Report what has changed, and else that this process lives."""
        pause = self._beat_secs
        while not self._is_closing:
            slot = self._look = Slot(self._engine, "something to report")
            if not self._has_to_report():
                await self._engine.park(slot, self._said_at + pause)
            if self._is_closing or not (
                self._has_to_report() or self._engine.now() >= self._said_at + pause
            ):
                continue
            if self._loss is not None:  # the other task looks for the server
                await self._engine.park(slot, self._engine.now() + pause)
                continue
            try:
                await self.ask("report", until=self._patience())
            except StepSourceLostError as error:
                self._loss = error
                self._renewal.set()

    async def _listen(self) -> None:
        while not self._is_closing:
            self._renewal = Stop()
            try:
                news = await self.ask("events", stop=self._renewal)
            except StopTraining:
                await self._find_again()
            except StepSourceLostError as error:
                self._loss = error
                await self._find_again()
            else:
                self.waits.take(news)

    async def _find_again(self) -> None:
        """Wait until the server answers again, or will not do so any more."""
        lost_at = self._engine.now()
        where = f"the parameter server at {self._calls.address.worker}"
        while not self._is_closing and self._loss is not None:
            self._step.set_source_state(SourceState.LOST, str(self._loss))
            if isinstance(self._loss, ActorGoneError):
                return self._give_up(str(self._loss))
            try:
                if await self._calls.is_gone(self._patience()):
                    return self._give_up(f"{where} is gone: its worker has left the cluster")
            except StepSourceLostError as error:  # the network may be cut; not for ever
                if self._engine.now() >= lost_at + max(self.welcome.lease_secs, _LEAST_LOSS_SECS):
                    return self._give_up(f"{where} is lost, and so is the scheduler: {error}")
            pause = Slot(self._engine, "the server to be back")
            await self._engine.park(pause, self._engine.now() + _PAUSE_SECS)
            try:
                await self.ask("report", until=self._patience())
            except StepSourceLostError as error:
                self._loss = error
            else:
                self._loss = None
        if not self._is_closing and not self.knowledge.state.is_closed:
            self._step.set_source_state(SourceState.LIVE)
        return None

    def _give_up(self, reason: str) -> None:
        if self._is_closing:
            return
        self._is_closing = self.knowledge.is_lost = True
        self._calls.loss.report(lambda: StepSourceLostError(reason))
        self._step.set_source_state(SourceState.CLOSED, reason)
        self.knowledge.abandon()
        self._look.wake()
