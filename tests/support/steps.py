"""Steps without sessions: calls driven by hand, a graph's variable, and worlds of workers.

Private, as a session runs one step at a time and chooses when: here several are under way at any
moment that a test needs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asynchooks import GlobalStep, StepUnreachableError, StopTraining
from asynchooks._engine.base import Engine, EngineTask, Sentinel, Slot
from asynchooks._engine.current import current_engine, use_engine
from asynchooks._engine.stop import Stop
from asynchooks._step.gate import UNREAD, Ticket
from asynchooks.distributed import SourceState, StepSource

from .virtual_kernel import Trampoline

HANGS_AFTER_SECS = 1e3  # twenty times as long as the longest of 15,000 worlds


class Call:
    """A call that may wait, in a task of its own that no event loop runs.

    Those that are given one engine go on in the order in which they are woken.
    """

    def __init__(
        self,
        fn: Callable[..., Awaitable[Any]],
        *args: Any,
        engine: Trampoline | None = None,
        **options: Any,
    ) -> None:
        self._engine = engine or Trampoline()
        self._outcome: Any = None

        async def call() -> None:
            try:
                self._outcome = await fn(*args, **options)
            except Exception as error:
                self._outcome = error

        with use_engine(self._engine):
            self._task = self._engine.start(call)
        self._go_on()

    @property
    def outcome(self) -> Any:
        """What it has returned or raised by now; None while it waits. Timeouts end at once."""
        self._go_on()
        return self._outcome

    @property
    def is_granted(self) -> bool:
        """Whether it was given a ticket."""
        return isinstance(self.outcome, Ticket)

    @property
    def is_waiting(self) -> bool:
        self._go_on()
        return not self._task.is_done

    def _go_on(self) -> None:
        while self._engine.fire_next():
            pass

    def cancel(self) -> None:
        """Its task takes note of that when the outcome is looked at."""
        self._task.cancel()


def ask(step: GlobalStep) -> Call:
    """Stand in line for a ticket."""
    return Call(step.gate.take_ticket)


def take(step: GlobalStep) -> Ticket:
    """A ticket that is granted at once."""
    ticket = step.gate.take_ticket_nowait()
    assert ticket is not None
    return ticket


def bound(step: GlobalStep, worker: Any = None) -> Any:
    """The step as a session has it: `stop` of what is returned is the session's."""
    return step.bound(Stop(), worker)


def run(step: GlobalStep, after: int | Sentinel | None) -> int | None:
    """A run that is granted at once, and the step after it; returns the step that it made."""
    return step.gate.settle(take(step), after)


class Graph:
    """A variable that holds the step: its runs move it and end unread."""

    def __init__(self) -> None:
        self.step = GlobalStep()
        self.worker = self.step.gate.open()
        self.variable = self.num_reads = 0
        self.error: Exception | None = None
        self.step.gate.reader = self.read

    def read(self) -> int:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return self.variable

    def run(self, num: int = 1) -> None:
        for _ in range(num):
            ticket = take(self.step)
            self.variable += 1
            self.step.gate.settle(ticket, UNREAD)


class IdleSource(StepSource):
    """A source that brings nothing and counts how often it was called."""

    def __init__(self, *, grants_credits: bool = True) -> None:
        self.grants_credits = grants_credits
        self.num_looks = 0

    def look_again(self) -> None:
        self.num_looks += 1

    def was_called(self) -> bool:
        """Whether it was, since the last time."""
        num, self.num_looks = self.num_looks, 0
        return num > 0


def fed(
    value: int = 0, *, limit: int | None = None, stride: int = 1, spare: int = 0
) -> tuple[GlobalStep, IdleSource]:
    """A step with one worker, which a source feeds with steps and credits, some of them spare."""
    step, source = GlobalStep(value, multi_process=True), IdleSource()
    step.gate.open()
    step.feed_from(source, stride)
    if limit is not None:
        step.raise_limit(limit)
        assert step.grant(spare, epoch=0)
    source.was_called()
    return step, source


async def pause(seconds: float) -> None:
    """In a world all are multiples of 1/64 s, so that much happens at one moment."""
    engine = current_engine()
    await engine.park(Slot(engine, "a pause"), engine.now() + seconds)


class Central:
    """The step of a whole world, and how many runs each process holds; nothing happens between."""

    def __init__(self, stride: int) -> None:
        self.step = self.epoch = 0
        self.stride = stride
        self.held: dict[Process, int] = {}
        self.armed: dict[Process, float] = {}

    def take(self, process: Process, epoch: int, wanted: int, in_hand: int, limit: int) -> int:
        if epoch != self.epoch:
            return 0
        before = self.held.get(process, 0)
        self.held[process] = in_hand
        free = max(0, math.ceil((limit - self.step) / self.stride) - sum(self.held.values()))
        granted = min(wanted, free, max(1, free // (2 * len(self.held))))
        self.held[process] += granted
        if self.held[process] < before:
            self.notify(list(self.armed))
        return granted

    def advance(self) -> int:
        self.step += self.stride
        self.notify([each for each, at in self.armed.items() if at <= self.step])
        return self.step

    def restart(self, step: int) -> None:
        self.step, self.epoch = step, self.epoch + 1
        self.held = dict.fromkeys(self.held, 0)
        self.notify(list(self.armed))

    def notify(self, processes: list[Process]) -> None:
        for each in processes:
            each.tell(self.step, self.epoch)


class Process:
    """A process that is alone: its step is the central one. Unread runs have it read later."""

    def __init__(self, central: Central, seed: int, *, unread: bool = False) -> None:
        self.engine: Engine = current_engine()
        self.central = central
        self.random = random.Random(seed)
        self.unread = unread
        self.step = GlobalStep(multi_process=isinstance(self, StepSource))
        self.worker = self.step.gate.open()  # as long as there are others
        self.epoch = 0  # the central one, as last received
        self.num_running = 0  # runs of this epoch
        self.is_exclusive = False
        central.armed[self] = math.inf
        if unread:
            self.step.gate.reader = lambda: central.step

    def tell(self, step: int, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.num_running = epoch, 0
            self.step.restart(step)

    def after(self, step: int) -> int | Sentinel:
        """The step after a run, as the process notes it."""
        return UNREAD if self.unread and self.random.random() < 0.5 else step

    async def delay(self) -> None:
        await pause(self.random.choice([0.0, 1 / 64, 1 / 32]))

    async def serve(self) -> None:
        """Bring what other processes do, and credits, until it is closed."""

    def close(self) -> None:
        """All its sessions have closed."""


class FedProcess(Process, StepSource):
    """One of several processes, and its source: it asks the central step for what is wanted here.

    It looks at that when it is called, and never by itself. Whatever is said between them takes
    time, on the clock of whichever engine runs it.
    """

    grants_credits = True

    def __init__(self, central: Central, seed: int) -> None:
        super().__init__(central, seed)
        self.is_due = self.is_closed = False
        self.slot = Slot(self.engine, "something to do")
        central.held[self] = 0
        self.step.feed_from(self, central.stride)

    def look_again(self) -> None:
        self.is_due = True
        self.slot.wake()

    def tell(self, step: int, epoch: int) -> None:
        self.engine.start(self.receive, step, epoch)

    async def receive(self, step: int, epoch: int) -> None:
        await self.delay()
        self.note(step, epoch)
        self.look_again()

    def note(self, step: int, epoch: int) -> None:
        super().tell(step, epoch)
        if epoch == self.epoch:
            self.step.publish(step)

    async def serve(self) -> None:
        central, said = self.central, 0
        while not self.is_closed:
            self.is_due = False
            demand, epoch = self.step.demand(), self.epoch
            # some to spare, for those that come next
            wanted = demand.num_short and demand.num_short + self.random.randrange(3)
            unused = 0 if demand.workers_open else demand.num_spare
            if unused and self.step.grant(-unused, epoch=demand.epoch):
                demand = demand._replace(num_spare=0)
            in_hand = demand.num_out + demand.num_spare
            if wanted or said != in_hand or central.armed[self] != demand.next_step:
                await self.delay()
                central.armed[self] = demand.next_step
                granted = central.take(self, epoch, wanted, in_hand, demand.limit or 0)
                said, news = in_hand + granted, (central.step, central.epoch)
                await self.delay()
                self.note(*news)
                if granted:
                    self.step.grant(granted, epoch=demand.epoch, limit=demand.limit, source=self)
                if granted or epoch != self.epoch:
                    continue
            self.slot = Slot(self.engine, "something to do")
            if not self.is_due:
                await self.engine.park(self.slot)

    def close(self) -> None:
        self.is_closed = True
        self.step.set_source_state(SourceState.CLOSED)
        self.look_again()


@dataclass
class World:
    """Workers that run steps until the limit, with all that may go wrong.

    Args:
        limit: in steps, >= 1; counted from the step where it is set if the world `begins_free`.
        stride: by how much a run moves the step.
        workers: how many there are in each process.
        seed: of all random choices.
        is_fed: whether the processes share one step by sources; else there is one process.
        begins_free: whether the limit is set only after a while.
        unread: whether some runs end unread. Not in a fed world.
        lost: runs that are abandoned; some of them end all the same. Not in a fed world.
        failure_rate: of the runs that do not move the step.
        restarts, exclusives: how often the step goes back; exclusive blocks.
        impatient: tasks that ask for a ticket or a block, and are cancelled.
        raised_by: how far the limit is raised on the way, in steps.
    """

    limit: int
    stride: int
    workers: list[int]
    seed: int
    is_fed: bool = False
    begins_free: bool = False
    unread: bool = False
    lost: int = 0
    failure_rate: float = 0.0
    restarts: int = 0
    exclusives: int = 0
    impatient: int = 0
    raised_by: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.central = Central(self.stride)
        self.processes: list[Process] = []
        self.impatient_tasks: list[EngineTask] = []
        self.is_limited = self.is_over = False
        self.num_waited = 0

    def check(self) -> None:
        """All have ended, at the limit: abandoned runs may have kept them from that."""
        step = self.central.step
        assert self.is_over, "all wait, and none is left to wake them"
        assert step < self.limit + self.stride, "it overshoots"
        assert self.lost or step >= self.limit, "it stops short"
        assert self.lost or self.num_waited == len(self.workers)
        for each in self.processes:
            statistics, demand = each.step.statistics(), each.step.demand()
            assert statistics.value == step
            assert statistics.stride in (None, self.stride)
            assert (statistics.tasks_waiting_for_ticket, statistics.is_exclusive) == (0, False)
            assert (demand.num_spare, demand.num_short) == (0, 0)
            assert demand.num_out <= self.lost

    async def main(self) -> None:
        engine = current_engine()
        disturbances: list[Callable[[], Awaitable[None]]] = [
            *[self.lose] * self.lost,
            *[self.restart] * self.restarts,
            *[self.stand_alone] * self.exclusives,
            *[self.lose_patience] * self.impatient,
            self.raise_limit,
        ]
        tasks, servers, waiters = list[EngineTask](), list[EngineTask](), list[EngineTask]()
        for num in self.workers:
            seed = self.random.randrange(2**32)
            if self.is_fed:
                process: Process = FedProcess(self.central, seed)
            else:
                process = Process(self.central, seed, unread=self.unread)
            self.processes.append(process)
            servers.append(engine.start(process.serve))
            tasks += [engine.start(self.work, process) for _ in range(num)]
        if self.lost:  # an abandoned run whose stride is not known may lead anywhere
            run(self.processes[0].step, self.central.advance())
        if self.begins_free:
            await pause(self.random.randrange(64) / 64)
            under_way = sum(each.num_running for each in self.processes)
            self.limit += self.central.step + under_way * self.stride
        self.is_limited = True
        for process in self.processes:
            process.step.raise_limit(self.limit)
            waiters.append(engine.start(self.wait, process))
        tasks += [engine.start(self.disturb, each) for each in disturbances]
        await self.end_of(tasks)
        for process in self.processes:
            process.step.gate.close(process.worker)
        await self.end_of(waiters)
        for process in self.processes:
            process.close()
        await self.end_of(servers)
        self.is_over = True

    async def end_of(self, tasks: list[EngineTask]) -> None:
        until = current_engine().now() + HANGS_AFTER_SECS
        for task in tasks:
            assert await task.wait(until), "it hangs"

    async def work(self, process: Process) -> None:
        step = process.step
        worker = step.gate.open()
        while True:
            try:
                await self.run(process)
            except StopTraining:
                # else it went back in the meantime
                if self.lost or step.value >= self.limit:
                    break
            await pause(self.random.choice([0.0, 0.0, 1 / 64, 1 / 4]))
        step.gate.close(worker)

    async def run(self, process: Process) -> None:
        gate = process.step.gate
        ticket = await gate.take_ticket()
        assert not process.is_exclusive
        if self.random.random() < 0.1:
            gate.give_back(ticket)
            return
        after: int | Sentinel | None = None
        epoch = process.epoch
        process.num_running += 1
        try:
            await pause(self.random.choice([0.0, 1 / 64, 1 / 16, 1 / 2]))
            if self.random.random() >= self.failure_rate:
                after = self.move(process, epoch)
            await process.delay()
        finally:
            process.num_running -= epoch == process.epoch
            self.cancel_impatient()  # those that are answered by this
            gate.settle(ticket, after)

    def move(self, process: Process, epoch: int) -> int | Sentinel | None:
        """The step after a run that has begun in an epoch of the central step."""
        if epoch != self.central.epoch:
            return None
        after = self.central.advance()
        assert not self.is_limited or after < self.limit + self.stride, "it overshoots"
        return process.after(after)

    async def wait(self, process: Process) -> None:
        limit = self.limit
        try:
            assert await process.step.wait_for(limit) >= limit
            self.num_waited += 1
        except StepUnreachableError:
            assert self.lost

    async def disturb(self, how: Callable[[], Awaitable[None]]) -> None:
        await pause(self.random.randrange(self.limit * 8) / 64)
        await how()

    async def lose(self) -> None:
        """A run that nobody waits for any longer."""
        process = self.random.choice(self.processes)
        gate = process.step.gate
        with suppress(StopTraining):
            ticket = await gate.take_ticket()
            epoch = process.epoch
            gate.abandon(ticket)
            await pause(self.random.choice([0.0, 1 / 8, 1.0]))
            if self.random.random() < 0.5:
                gate.settle(ticket, self.move(process, epoch))

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
            process.is_exclusive = True
            assert process.num_running == 0
            try:
                await pause(self.random.choice([0.0, 1 / 4]))
            finally:
                process.is_exclusive = False
                self.cancel_impatient()

    async def lose_patience(self) -> None:
        """A task asks for a ticket or for a block, and leaves; perhaps when it comes."""
        how = self.random.choice([self.try_to_run, self.try_to_run, self.stand_alone])
        task = current_engine().start(how)
        self.impatient_tasks.append(task)
        await pause(self.random.choice([0.0, 1 / 64, 1 / 32, 1 / 8]))
        self.cancel_impatient()
        await task.wait()

    def cancel_impatient(self) -> None:
        while self.impatient_tasks:
            self.impatient_tasks.pop().cancel()

    async def try_to_run(self) -> None:
        with suppress(StopTraining):
            await self.run(self.random.choice(self.processes))
