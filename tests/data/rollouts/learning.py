"""A learner in virtual time that remembers its batches, and a service of sandboxes."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    SessionRunHook,
    StopAtStepHook,
)
from asynchooks.data import Rollout, RolloutStatistics, Stage
from asynchooks.simulation import Simulation

from .schedules import ENGINES

on_engines = pytest.mark.parametrize("backend", ENGINES)
on_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])
"""For a program that uses anyio itself."""


class Learner:
    """It trains with the batches of a stage, in virtual time.

    Args:
        train_secs: of each step.
        begin: the global step at the beginning.
    """

    def __init__(
        self,
        backend: Any,
        train_secs: float = 1.0,
        begin: int = 0,
        seed: int = 0,
        *,
        shuffle_ties: bool = False,
    ) -> None:
        self.simulation = Simulation(seed, backend, shuffle_ties=shuffle_ties)
        self.step = GlobalStep(begin)
        self.batches: list[list[Rollout]] = []
        self.train_secs = train_secs
        self.error: Exception | None = None
        """What the next step raises."""

    @property
    def now(self) -> float:
        return self.simulation.now

    def sleep(self, secs: float) -> Awaitable[None]:
        return self.simulation.sleep(secs)

    def run(self, main: Callable[[], Awaitable[Any]]) -> Any:
        return self.simulation.run(main)

    async def answer(self, item: int) -> int:
        """A rollout of 1 s, whose result is its item."""
        await self.sleep(1.0)
        return item

    async def learn(self, groups: list[Rollout]) -> dict[str, float]:
        if self.error is not None:
            raise self.error
        await self.simulation.sleep(self.train_secs)
        self.batches.append(groups)
        return {"loss": 0.0}

    async def train(
        self,
        stage: Stage[list[Rollout]] | FeedHook,
        last_step: int | None = None,
        hooks: Iterable[SessionRunHook] = (),
    ) -> Any:
        """Train up to a step, or to the end of the data; returns the position then."""
        feed = stage if isinstance(stage, FeedHook) else FeedHook(stage, "groups")
        all_hooks = [feed, *hooks]
        if last_step is not None:
            all_hooks.append(StopAtStepHook(last_step=last_step))
        async with MonitoredSession(all_hooks, self.creator) as session:
            while not session.should_stop():
                await session.run("loss")
        return saved(feed)

    @property
    def creator(self) -> FunctionSessionCreator:
        return FunctionSessionCreator(self.learn, global_step=self.step)

    @property
    def items(self) -> list[list[Any]]:
        """By batch."""
        return [[each.item for each in batch] for batch in self.batches]

    @property
    def ages(self) -> list[list[int]]:
        return [[each.staleness for each in batch] for batch in self.batches]


def saved(holder: Any) -> Any:
    """A position, as a checkpoint would have it."""
    return json.loads(json.dumps(holder.state_dict()))


def known(stage: Stage[Any]) -> RolloutStatistics:
    statistics = stage.statistics()
    assert isinstance(statistics, RolloutStatistics)
    return statistics


class Sandboxes:
    """A service that has a sandbox from the moment of the request until it is deleted."""

    def __init__(
        self, learner: Learner, create_secs: Callable[[], float], delete_secs: float = 0.3
    ) -> None:
        self.learner = learner
        self.create_secs = create_secs
        self.delete_secs = delete_secs
        self.open: set[int] = set()
        self.num_created = 0
        self.num_deleted = 0

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[int]:
        number = self.num_created
        self.num_created += 1
        self.open.add(number)
        await self.learner.sleep(self.create_secs())
        try:
            yield number
        finally:
            await self.learner.sleep(self.delete_secs)
            self.open.remove(number)
            self.num_deleted += 1


def log_of(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= level]
