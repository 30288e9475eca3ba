"""Workers of a parameter server in virtual time, with a log of what they did when."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np

from asynchooks import StopTraining
from asynchooks._engine.base import EngineTask, Slot
from asynchooks._engine.current import current_engine
from asynchooks.protocols import (
    Asynchronous,
    DiscardStale,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Outcome,
    ParameterServer,
    Protocol,
    StaleSynchronous,
    Synchronous,
)

from ..support.virtual_kernel import AnyioKernel, Trampoline

Delay = Callable[[int, int], float]
"""(worker, how many computations it began before) -> seconds."""
Event = tuple[float, Callable[[], object]]
"""(Time, what happens then), beside the workers."""

ALL: list[Protocol] = [
    Asynchronous(), Synchronous(), KSync(2), KBatchSync(2), KAsync(2), KBatchAsync(3),
    StaleSynchronous(0), StaleSynchronous(2), DiscardStale(KBatchAsync(2), 1),
]  # fmt: skip


async def pause(seconds: float) -> None:
    engine = current_engine()
    await engine.park(Slot(engine, "a pause"), engine.now() + seconds)


class World:
    """One server, its workers, and the log: (time, worker, what)."""

    def __init__(self, server: ParameterServer, delay: Delay, num_steps: int = 10**9) -> None:
        self.server = server
        self.delay = delay
        self.num_steps = num_steps
        self.log: list[tuple[float, int, str]] = []
        self.updates: list[float] = []  # when each came
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.num_begun = [0] * server.num_workers
        self.num_done = [0] * server.num_workers
        self.ended: set[int] = set()
        self.tasks: list[EngineTask] = []
        self.at_begin: Callable[[int], None] = lambda worker: None

    def note(self, worker: int, what: str) -> None:
        self.log.append((current_engine().now(), worker, what))

    async def work(self, worker: int) -> None:
        """Train until there is nothing more to do; may be called again after a crash."""
        server = self.server
        try:
            while self.num_done[worker] < self.num_steps:
                await server.begin_step(worker)
                self.at_begin(worker)
                await self._step(worker)
                self.num_done[worker] += 1
            self.note(worker, "done")
        except StopTraining:
            self.note(worker, "stopped")
        server.leave(worker)
        self.ended.add(worker)

    async def _step(self, worker: int) -> None:
        server = self.server
        parameters, version = server.pull(worker)
        self.note(worker, f"pulled {version}")
        delay = self.delay(worker, self.num_begun[worker])
        self.num_begun[worker] += 1
        is_done, _ = await server.compute(version, pause, delay)
        if not is_done:
            self.note(worker, "abandoned")
            return
        before = server.version
        outcome, staleness = server.push(worker, 2.0 * parameters - worker, version)
        self.outcomes[outcome] += 1
        self.note(worker, f"{outcome.value} {staleness}")
        self.updates += [current_engine().now()] * (server.version - before)
        await server.end_step(worker)

    def cancel(self, worker: int) -> None:
        self.tasks[worker].cancel()

    def restart(self, worker: int) -> None:
        self.tasks[worker] = current_engine().start(self.work, worker)

    def run(
        self,
        *events: Event,
        beside: Callable[[], Awaitable[None]] | None = None,
        backend: str | None = None,
    ) -> World:
        """All workers in virtual time, until nothing happens any more; on an event loop or none."""

        async def main() -> None:
            engine = current_engine()
            self.tasks = [engine.start(self.work, i) for i in range(self.server.num_workers)]
            for time, act in events:
                await pause(time - engine.now())
                act()
            if beside is not None:
                await beside()
            for task in self.tasks:
                await task.wait()

        async def run_kernel() -> None:
            await AnyioKernel().run(main)

        if backend is None:
            Trampoline().run(main)
        else:
            anyio.run(run_kernel, backend=backend)
        return self


def server_of(
    parameters: Any, protocol: Protocol | None = None, num_workers: int = 2, **arguments: Any
) -> ParameterServer:
    protocol = protocol or Asynchronous()
    return ParameterServer(parameters, protocol, num_workers=num_workers, **arguments)


def make_server(
    protocol: Protocol, num_workers: int, limit: int | None = None, **arguments: Any
) -> ParameterServer:
    server = server_of(np.ones(2), protocol, num_workers, **arguments)
    if limit is not None:
        server.global_step.raise_limit(limit)
    return server


def fixed(*secs: float) -> Delay:
    """Each worker takes always as long."""
    return lambda worker, _: secs[worker]


def check_counts(world: World) -> None:
    """Every gradient has one outcome, and the counts of the server say so."""
    server = world.server
    num_pushed = sum(world.outcomes.values())
    assert num_pushed == server.num_applied + server.num_collected + server.num_discarded
    assert server.num_discarded == world.outcomes[Outcome.DISCARDED]
    assert sum(server.staleness_counts().values()) == server.num_applied
    each = [server.staleness_counts(worker) for worker in range(server.num_workers)]
    assert sum(sum(counts.values()) for counts in each) == server.num_applied
