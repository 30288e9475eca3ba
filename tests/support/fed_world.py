"""Workers of several processes in one, whose steps are fed by one central step with tickets.

It knows nothing of the engine that runs it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from asynchooks import StopTraining
from asynchooks._engine.base import EngineTask
from asynchooks._engine.current import current_engine

from .fed_steps import Central, Process, pause

HANGS_AFTER_SECS = 1e5


class World:
    """Workers of several processes that run steps until the limit, with all that may go wrong."""

    def __init__(
        self, limit: int, stride: int, workers: list[int], seed: int, *,
        says_when: bool = True, failure_rate: float = 0.0, restarts: int = 0, exclusives: int = 0,
        impatient: int = 0, raised_by: int = 0,
    ) -> None:  # fmt: skip
        self.limit = limit
        self.workers = workers
        self.random = random.Random(seed)
        self.central = Central(stride)
        self.says_when = says_when
        self.failure_rate = failure_rate
        self.disturbances = (
            [self.restart] * restarts + [self.stand_alone] * exclusives
            + [self.lose_patience] * impatient + [self.raise_limit] * (raised_by > 0)
        )  # fmt: skip
        self.raised_by = raised_by
        self.processes: list[Process] = []
        self.num_waited = 0
        self.is_over = False

    async def main(self) -> None:
        engine = current_engine()
        tasks: list[EngineTask] = []
        for num in self.workers:
            process = Process(self.central, self.random.randrange(2**32), says_when=self.says_when)
            self.processes.append(process)
            process.step.raise_limit(self.limit)
            tasks += [engine.start(self.work, process) for _ in range(num)]
            tasks.append(engine.start(self.wait, process))
        servers = [engine.start(each.serve) for each in self.processes]
        tasks += [engine.start(self.disturb, each) for each in self.disturbances]
        for task in tasks:
            assert await task.wait(engine.now() + HANGS_AFTER_SECS), "it hangs"
        for each in self.processes:
            each.close()
        for server in servers:
            await server.wait()
        self.is_over = True

    async def work(self, process: Process) -> None:
        step = process.step
        worker = step.open_worker()
        while True:
            try:
                await self.run(process)
            except StopTraining:
                if step.value >= (step.limit or 0):
                    break
            await pause(self.random.choice([0.0, 0.0, 0.01, 0.3]))
        step.close_worker(worker)

    async def run(self, process: Process) -> None:
        ticket = await process.step.admission.take_ticket()
        epoch, after = process.epoch, None
        try:
            await pause(self.random.choice([0.0, 0.01, 0.05, 0.4]))
            if epoch == self.central.epoch and self.random.random() >= self.failure_rate:
                after = self.central.advance()
                assert after < self.limit + self.central.stride, "it overshoots"
            await process.delay()
        finally:
            process.step.admission.settle(ticket, after)

    async def wait(self, process: Process) -> None:
        limit = self.limit
        assert await process.step.wait_for(limit) >= limit
        self.num_waited += 1

    async def disturb(self, how: Callable[[], Awaitable[None]]) -> None:
        await pause(self.random.random() * self.limit * 0.1)
        await how()

    async def restart(self) -> None:
        if self.central.step < self.limit:
            self.central.restart(self.random.randint(0, self.central.step))

    async def raise_limit(self) -> None:
        if self.central.step < self.limit:
            self.limit += self.raised_by
            for each in self.processes:
                each.step.raise_limit(self.limit)

    async def stand_alone(self) -> None:
        process = self.random.choice(self.processes)
        async with process.step.exclusive():
            assert process.step.statistics().tickets == 0
            await pause(self.random.choice([0.0, 0.3]))

    async def lose_patience(self) -> None:
        """A task asks for a ticket, and leaves; perhaps at the moment when it comes."""
        process = self.random.choice(self.processes)
        task = current_engine().start(self.try_to_run, process)
        await pause(self.random.choice([0.0, 0.001, 0.02, 0.1]))
        task.cancel()
        await task.wait()

    async def try_to_run(self, process: Process) -> None:
        if process.step.limit is not None:  # else all its sessions have closed
            with suppress(StopTraining):
                await self.run(process)
