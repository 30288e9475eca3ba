"""A learner in virtual time that remembers its batches, and a service of sandboxes."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    StopAtStepHook,
)
from asynchooks.data import Rollout, RolloutStage, Stage, rollouts
from asynchooks.simulation import Simulation

from .schedules import ENGINES

on_engines = pytest.mark.parametrize("backend", ENGINES)
on_loops = pytest.mark.parametrize("backend", ENGINES[:2])


class GenerationError(Exception):
    pass


class Learner:
    """It trains with the batches of a stage, in virtual time.

    Args:
        begin: the global step at the beginning.
    """

    def __init__(self, backend: Any, begin: int = 0) -> None:
        self.backend = backend
        self.simulation = Simulation(backend=backend)
        self.step = GlobalStep(begin)
        self.batches: list[list[Rollout]] = []
        self.train_secs = 1.0
        self.run = self.simulation.run
        self.sleep = self.simulation.sleep

    @property
    def now(self) -> float:
        return self.simulation.now

    def again(self, position: Any, stage: Stage[Any]) -> Learner:
        """The next life: it goes on at a position, with a model of as many steps."""
        stage.load_state_dict(position)
        return Learner(self.backend, self.step.value)

    async def answer(self, item: int) -> int:
        """A rollout of 1 s, whose result is its item."""
        await self.sleep(1.0)
        return item

    async def learn(self, groups: list[Rollout]) -> dict[str, float]:
        await self.sleep(self.train_secs)
        self.batches.append(groups)
        return {"loss": 0.0}

    async def train(self, stage: Stage[list[Rollout]], last_step: int | None = None) -> Any:
        """Train up to a step, or to the end of the data; returns the position then."""
        feed = FeedHook(stage, "groups")
        hooks: list[Any] = [feed]
        if last_step is not None:
            hooks.append(StopAtStepHook(last_step=last_step))
        async with MonitoredSession(hooks, self.creator) as session:
            while not session.should_stop():
                await session.run("loss")
        return saved(feed)

    def train_with(self, stage: Stage[list[Rollout]], last_step: int | None = None) -> Any:
        """The same, from outside of the simulation."""
        return self.run(lambda: self.train(stage, last_step))

    def failure_with(self, stage: Stage[list[Rollout]]) -> BaseException:
        """What training ends by."""
        try:
            self.train_with(stage)
        except BaseException as error:
            return error
        pytest.fail("training has ended cleanly")

    @property
    def creator(self) -> FunctionSessionCreator:
        return FunctionSessionCreator(self.learn, global_step=self.step)

    @property
    def items(self) -> list[list[Any]]:
        """By batch."""
        return [[each.item for each in batch] for batch in self.batches]

    @property
    def flat(self) -> list[Any]:
        return [item for items in self.items for item in items]


async def same(item: Any) -> Any:
    return item


def made(
    fn: Any = same, source: Any = range(9), batch_size: Any = 2, **options: Any
) -> RolloutStage:
    """A stage; what is not given is of the smallest sizes that overlap."""
    return rollouts(fn, source, batch_size, **{"concurrency": 4, "max_staleness": 1, **options})


def saved(holder: Any) -> Any:
    """A position, as a checkpoint would have it."""
    return json.loads(json.dumps(holder.state_dict()))


class Sandboxes:
    """A service that has a sandbox from the moment of the request until it is deleted."""

    def __init__(
        self, sleep: Callable[[float], Awaitable[None]], create_secs: Callable[[], float]
    ) -> None:
        self.sleep = sleep
        self.create_secs = create_secs
        self.open: set[int] = set()
        self.num_created = 0

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[int]:
        number = self.num_created
        self.num_created += 1
        self.open.add(number)
        await self.sleep(self.create_secs())
        try:
            yield number
        finally:
            await self.sleep(0.25)
            self.open.remove(number)


def log_of(caplog: pytest.LogCaptureFixture, text: str = "") -> list[str]:
    """Warnings and errors with this text."""
    records = [each for each in caplog.records if each.levelno >= logging.WARNING]
    return [each.getMessage() for each in records if text in each.getMessage()]
