"""Services that steps in flight are submitted to, and what the tests train on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunArgs,
    SessionRunHook,
)
from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks.data import prefetch
from asynchooks.simulation import Simulation

CYCLE_SECS = 10.0
AT_ONCE = Recovery(first_pause_secs=0.0)


class Reply:
    """The result of one request, when it is there."""

    def __init__(self, items: Any, client: object = None) -> None:
        self.items, self.client = items, client
        self.error: BaseException | None = None
        self.is_there = False
        self._slots: list[Slot] = []

    def give(self, error: BaseException | None = None) -> None:
        if not self.is_there:
            self.is_there, self.error = True, error
            for slot in self._slots:
                slot.wake()

    async def result(self) -> dict[str, Any]:
        if not self.is_there:
            engine = current_engine()
            self._slots.append(Slot(engine, "a result of the service"))
            try:
                await engine.park(self._slots[-1])
            except BaseException:  # a client that hangs up: its request is dropped
                self.is_there = True
                raise
        if self.error is not None:
            raise self.error
        return {"items": self.items}


class Service:
    """Trains, in virtual time, with the first request that was there when a cycle began.

    Args:
        errors: by the number of a request, from 1: what its reply raises; with a PreemptionError
            all that is queued is lost, too.
    """

    def __init__(
        self,
        simulation: Simulation,
        cycle_secs: float = CYCLE_SECS,
        errors: Mapping[int, BaseException] | None = None,
    ) -> None:
        self.simulation, self.cycle_secs = simulation, cycle_secs
        self.errors = dict(errors or {})
        self.num_requests = self.num_errors = 0
        self.updates: list[Any] = []  # what it was trained with
        self.queue: deque[tuple[int, Reply]] = deque()
        self._now: tuple[int, Reply] | None = None
        simulation.start(self._work)

    async def _work(self) -> None:
        while True:
            while self.queue and self.queue[0][1].is_there:
                self.queue.popleft()
            self._now = self.queue.popleft() if self.queue else None
            await self.simulation.sleep(self.cycle_secs)
            now, self._now = self._now, None
            if now is not None:
                self._answer(*now)

    def _answer(self, number: int, reply: Reply) -> None:
        if reply.is_there:  # it was lost
            return
        error = self.errors.get(number)
        if error is None:
            self.updates.append(reply.items)
        else:
            self.num_errors += 1
        reply.give(error)
        if isinstance(error, PreemptionError):
            self.lose()

    def submit(self, items: Any, client: object = None) -> Reply:
        self.num_requests += 1
        reply = Reply(items, client)
        self.queue.append((self.num_requests, reply))
        return reply

    def lose(self, client: object = None) -> None:
        """It will not train with what is queued, of one client or of all of them."""
        queued = [each for each in (self._now, *self.queue) if each is not None]
        for _, reply in queued:
            if client in (None, reply.client):
                reply.give(PreemptionError("the service was lost"))

    def state(self) -> list[Any]:
        return list(self.updates)

    async def step(self, items: Any = None) -> Awaitable[dict[str, Any]]:
        """A step function of two phases."""
        return self.submit(items).result()


class Gated:
    """Trains in real time with the numbers from 0, with each once its gate is open.

    Args:
        num_items: the number of items.
        is_overlapping: whether each submission opens the gate of the one before it, and the result
            of the last but one that of the last.
    """

    def __init__(self, num_items: int, *, is_overlapping: bool = False) -> None:
        self.gates = [anyio.Event() for _ in range(num_items)]
        self.updates: list[int] = []  # what it was trained with
        self._is_overlapping = is_overlapping

    async def step(self, items: int) -> Awaitable[dict[str, Any]]:
        """A step function of two phases."""
        if self._is_overlapping and items > 0:
            self.gates[items - 1].set()
        return self._outputs(items)

    async def _outputs(self, items: int) -> dict[str, Any]:
        await self.gates[items].wait()
        self.updates.append(items)
        if self._is_overlapping and items == len(self.gates) - 2:
            self.gates[-1].set()
        return {"items": items}


class Log(SessionRunHook):
    """Writes down before_run and after_run, with their number, and the step in after_run."""

    may_overlap = True

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.num_before = self.num_after = 0

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        self.num_before += 1
        self.log.append(f"B{self.num_before}")
        return SessionRunArgs("items")

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.num_after += 1
        self.log.append(f"A{self.num_after}")
        assert run_context.step_is_made


class Restores(SessionRunHook):
    """Restores the model of a service as it was before its first step."""

    def __init__(self, updates: list[Any]) -> None:
        self.updates = updates

    async def restore_model(self, session: Any) -> int:
        self.updates.clear()
        return 0


class Doing(SessionRunHook):
    """Calls functions with the number of the run, from 1, before and after it."""

    may_overlap = True

    def __init__(
        self,
        before: Callable[[int, Any], Awaitable[None]] | None = None,
        after: Callable[[int, Any], Awaitable[None]] | None = None,
    ) -> None:
        self.before, self.after = before, after
        self.num_before = self.num_after = 0

    async def before_run(self, run_context: Any) -> None:
        self.num_before += 1
        if self.before is not None:
            await self.before(self.num_before, run_context)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.num_after += 1
        if self.after is not None:
            await self.after(self.num_after, run_context)


def logged(service: Service, log: list[Any]) -> Callable[..., Any]:
    """The step function of the service, which writes down submissions and results."""

    async def step(items: Any) -> Any:
        number = service.num_requests + 1
        log.append(f"S{number}")
        reply = service.submit(items)

        async def outputs() -> Any:
            result = await reply.result()
            log.append(f"R{number}")
            return result

        return outputs()

    return step


def feed(num_items: int = 100) -> FeedHook:
    return FeedHook(prefetch(range(num_items), 1), "items")


def logged_session(
    service: Service, log: list[Any], *hooks: SessionRunHook, in_flight: int = 2
) -> MonitoredSession:
    """It feeds numbers to the service; its runs, submissions and results are written down."""
    creator = FunctionSessionCreator(logged(service, log), in_flight=in_flight)
    return MonitoredSession([feed(), Log(log), *hooks], creator)


async def run_to_stop(session: MonitoredSession, results: list[Any]) -> None:
    """Run until the session should stop, and add the results."""
    while not session.should_stop():
        results.append(await session.run("items"))


def has_flights() -> bool:
    return any("_fly" in repr(coroutine) for _, coroutine in current_engine().running_tasks())


def assert_nothing_left(step: GlobalStep) -> None:
    statistics = step.statistics()
    assert statistics.tickets == statistics.tasks_waiting_for_ticket == 0
    assert not statistics.is_exclusive
    assert not has_flights()
