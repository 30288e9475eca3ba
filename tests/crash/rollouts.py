"""Training on rollouts, to be killed or interrupted."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    Retention,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
)
from asynchooks.data import Rollout, RolloutStatistics, WhenStale, rollouts, shielded

from ..support.loops import loop_of
from .programs import Reports

NUM_WORKERS = 3
BATCH = 4
MAX_STALENESS = 3
MAX_PLACES = 200_000


class Answer(NamedTuple):
    item: int
    weights: int
    """How many steps they had been trained when the call began."""


class Policy:
    """It knows how often it was trained with each place, and for how many steps."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {
            "counts": np.zeros(MAX_PLACES, np.int8),
            "num_steps": np.zeros(1, np.int64),
            "top": np.zeros(1, np.int64),
        }

    @property
    def num_steps(self) -> int:
        return int(self.arrays["num_steps"][0])

    def train(self, groups: list[Rollout]) -> None:
        for each in groups:
            self.arrays["counts"][each.place] += 1
            self.arrays["top"][0] = max(int(self.arrays["top"][0]), each.place)
        self.arrays["num_steps"] += 1


def check_ages(groups: list[Rollout], num_steps: int) -> None:
    places = [each.place for each in groups]
    assert places == sorted(places)
    for each in groups:
        assert each.result.item == each.item == each.place
        assert each.version <= each.result.weights
        assert each.staleness <= MAX_STALENESS, each
        # other workers may train meanwhile
        assert num_steps - each.result.weights <= MAX_STALENESS + NUM_WORKERS - 1, each


def train_on_rollouts(
    loop: str, directory: Path, pipe: Connection, seed: int, drops: bool, num_items: int
) -> None:
    """Train by several workers, of which the last one saves in the background."""
    backend, options = loop_of(loop)
    anyio.run(
        _train, directory, pipe, seed, drops, num_items, backend=backend, backend_options=options
    )


async def _train(directory: Path, pipe: Connection, seed: int, drops: bool, num_items: int) -> None:
    policy, rng = Policy(), random.Random(seed)

    async def answer(item: int) -> Answer:
        weights = policy.num_steps
        await anyio.sleep(0.03 if rng.random() < 0.05 else 0.004 * rng.random())
        return Answer(item, weights)

    async def step(groups: list[Rollout]) -> dict[str, float]:
        check_ages(groups, policy.num_steps)
        await anyio.sleep(0.002 * rng.random())
        policy.train(groups)
        return {}

    stage = rollouts(
        answer, range(num_items), BATCH, concurrency=BATCH * rng.randint(1, 5),
        max_staleness=MAX_STALENESS,
        when_stale=WhenStale.DROP if drops else WhenStale.WAIT,
        accept=(lambda result: result.item % 5 > 0) if drops else None,
    )  # fmt: skip
    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def work(place: int) -> None:
        hooks: list[SessionRunHook] = [FeedHook(stage, "groups")]
        if place == NUM_WORKERS - 1:
            hooks += [
                Reports(pipe),
                CheckpointSaverHook(
                    directory, save_steps=7, saver=StateDictSaver(arrays=policy.arrays),
                    listeners=[Reports(pipe)], background=True, retention=Retention(max_to_keep=2),
                ),
            ]  # fmt: skip
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run([])

    try:
        async with anyio.create_task_group() as group:
            for place in range(NUM_WORKERS):
                group.start_soon(work, place)
    except BaseException as error:
        pipe.send(("fails", repr(error)))
        raise
    known = stage.statistics()
    assert isinstance(known, RolloutStatistics)
    num_reported = known.num_refused + known.num_dropped + known.num_failures
    position = FeedHook(stage, "groups").state_dict()
    pipe.send(("ends", policy.arrays["counts"].tobytes(), num_reported, position))


# Sandboxes are files; what is left of them was leaked


def generate_in_sandboxes(loop: str, directory: Path, pipe: Connection, seed: int) -> None:
    """Train until Ctrl-C, with 50 sandboxes under way."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if loop == "asyncio.run":
            asyncio.run(_generate(directory, pipe, seed))
        else:
            backend, options = loop_of(loop)
            anyio.run(_generate, directory, pipe, seed, backend=backend, backend_options=options)
    except KeyboardInterrupt:
        pipe.send(("interrupted",))
    except BaseException as error:
        pipe.send(("fails", repr(error)))
        raise


async def _generate(directory: Path, pipe: Connection, seed: int) -> None:
    rng = random.Random(seed)

    @asynccontextmanager
    async def sandbox(item: int) -> AsyncIterator[Path]:
        path = directory / str(item)
        path.touch()  # the service has it as soon as it has the request
        await anyio.sleep(0.02 * rng.random())
        try:
            yield path
        finally:
            await anyio.sleep(0.01 * rng.random())
            path.unlink()

    async def answer(item: int) -> int:
        async with shielded(sandbox(item)) as path:
            await anyio.sleep(0.05 * rng.random())
            assert path.exists()
            return item

    async def step(groups: list[Rollout]) -> dict[str, float]:
        await anyio.sleep(0.002)
        return {}

    stage = rollouts(
        answer, range(MAX_PLACES), 8, concurrency=50, max_staleness=5, when_stale=WhenStale.DROP
    )
    hooks = [FeedHook(stage, "groups"), Reports(pipe)]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        while not session.should_stop():
            await session.run([])
