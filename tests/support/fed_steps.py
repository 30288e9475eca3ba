"""Sources for tests: one that only counts its calls, and processes fed by one central step.

All processes are in this one. Whatever is said between them takes time, on the clock of whichever
engine runs it.
"""

from __future__ import annotations

import math
import random

from asynchooks import GlobalStep
from asynchooks._engine.base import Engine, Slot
from asynchooks._engine.current import current_engine
from asynchooks._step.credits import CreditPolicy, Move
from asynchooks.distributed import Demand, SourceState, StepSource


class IdleSource(StepSource):
    """A source that brings nothing and counts how often it was called."""

    def __init__(self, *, grants_credits: bool = True) -> None:
        self.grants_credits = grants_credits
        self.num_looks = 0

    def look_again(self) -> None:
        self.num_looks += 1

    def looks(self) -> int:
        """How often since the last time."""
        num, self.num_looks = self.num_looks, 0
        return num


def fed(
    value: int = 0, *, limit: int | None = None, stride: int = 1
) -> tuple[GlobalStep, IdleSource]:
    """A step with one worker that a source feeds with steps and credits."""
    step, source = GlobalStep(value, multi_process=True), IdleSource()
    step.open_worker()
    step.feed_from(source, stride)
    if limit is not None:
        step.raise_limit(limit)
    source.looks()
    return step, source


async def pause(seconds: float) -> None:
    engine = current_engine()
    await engine.park(Slot(engine, "a pause"), engine.now() + seconds)


class Central:
    """The step of all processes, and how many runs each holds; nothing happens in between."""

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
            each.engine.start(each.receive, self.step, self.epoch)


class Process(StepSource):
    """One process's source: asks the central step for what is wanted here.

    Args:
        says_when: whether a `CreditPolicy` decides, and looks again after a while; else it asks for
            what is wanted whenever it is called, and never looks by itself.
    """

    grants_credits = True

    def __init__(self, central: Central, seed: int, *, says_when: bool) -> None:
        self.engine: Engine = current_engine()
        self.central = central
        self.random = random.Random(seed)
        self.rationing = CreditPolicy() if says_when else None
        self.step = GlobalStep(multi_process=True)
        self.epoch = 0  # the central one, as last received
        self.is_due = self.is_closed = False
        self.slot = Slot(self.engine, "something to do")
        self.num_asked_at_once = 0
        central.held[self], central.armed[self] = 0, math.inf
        self.step.feed_from(self, central.stride)

    def look_again(self) -> None:
        self.is_due = True
        self.slot.wake()

    async def receive(self, step: int, epoch: int) -> None:
        await self.delay()
        self.note(step, epoch)
        self.look_again()

    def note(self, step: int, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch = epoch
            self.step.restart(step)
        elif epoch == self.epoch:
            self.step.publish(step)

    async def delay(self) -> None:
        await pause(self.random.choice([0.0, 0.001, 0.02]))

    def next_move(self, demand: Demand) -> Move:
        if self.rationing is not None:
            return self.rationing.next_move(demand, self.engine.now())
        is_over = not demand.workers_open
        # some to spare, for those that come next
        ask = demand.num_short and demand.num_short + self.random.randrange(3)
        return Move(ask=ask, give_back=demand.num_spare * is_over, is_idle=True)

    async def serve(self) -> None:
        central, said = self.central, 0
        while not self.is_closed:
            self.is_due = False
            demand = self.step.demand()
            move = self.next_move(demand)
            if move.give_back and self.step.grant(-move.give_back, epoch=demand.epoch):
                demand = demand._replace(num_spare=0)
            in_hand, epoch = demand.num_out + demand.num_spare, self.epoch
            is_news = move.ask or (move.is_idle and said != in_hand)
            if is_news or central.armed[self] != demand.next_step:
                await self.delay()
                central.armed[self] = demand.next_step
                limit = 0 if demand.limit is None else demand.limit
                granted = central.take(self, epoch, move.ask, in_hand, limit)
                said, news = in_hand + granted, (central.step, central.epoch)
                await self.delay()
                self.note(*news)
                if move.ask and self.rationing is not None:
                    self.rationing.take_note(granted, self.step.demand(), self.engine.now())
                if granted:
                    self.step.grant(granted, epoch=demand.epoch, limit=demand.limit, source=self)
                if granted or epoch != self.epoch:
                    continue
            self.slot = Slot(self.engine, "something to do")
            if not self.is_due:
                await self.engine.park(self.slot, move.look_at)

    def close(self) -> None:
        self.is_closed = True
        self.step.set_source_state(SourceState.CLOSED)
        self.look_again()
