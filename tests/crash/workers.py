"""Training by several workers that share a model and its input, to be killed."""

import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
)
from asynchooks.data import (
    Rollout,
    RolloutStatistics,
    WhenStale,
    map_concurrent,
    prefetch,
    rollouts,
)

from ..support.loops import loop_of
from .programs import saving

NUM_WORKERS = 4
BATCH = 4
MAX_STALENESS = 3
MAX_ITEMS = 200_000


class Answer(NamedTuple):
    item: int
    weights: int
    """How many steps they had been trained when the call began."""


class Policy:
    """It knows how often it was trained with each item, and for how many steps."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {
            "counts": np.zeros(MAX_ITEMS, np.int8),
            "num_steps": np.zeros(1, np.int64),
            "sum": np.zeros(1, np.int64),
        }
        self.saver = StateDictSaver(arrays=self.arrays)

    @property
    def num_steps(self) -> int:
        return int(self.arrays["num_steps"][0])

    @property
    def items(self) -> list[int]:
        """Those that it was trained with, each of them once."""
        counts = self.arrays["counts"]
        found: list[int] = np.flatnonzero(counts).tolist()
        assert counts.sum() == len(found)
        assert self.arrays["sum"] == sum(found)
        return found

    def train(self, items: list[int]) -> None:
        for each in items:
            self.arrays["counts"][each] += 1
            self.arrays["sum"] += each
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


def train_together(
    loop: str, directory: Path, pipe: Connection, kind: str, seed: int, num_items: int
) -> None:
    """Train by several workers, of which the last one saves in the background.

    Args:
        kind: "rollouts", or those that are "dropped", or items that are "fed", or of a "loop".
    """
    backend, options = loop_of(loop)
    args = directory, pipe, kind, seed, num_items
    anyio.run(_train, *args, backend=backend, backend_options=options)


async def _train(directory: Path, pipe: Connection, kind: str, seed: int, num_items: int) -> None:
    policy, rng = Policy(), random.Random(seed)
    drops, of_rollouts = kind == "dropped", kind in ("dropped", "rollouts")

    async def answer(item: int) -> Answer:
        weights = policy.num_steps
        await anyio.sleep(0.03 if rng.random() < 0.05 else 0.004 * rng.random())
        return Answer(item, weights)

    async def step(x: Any) -> dict[str, float]:
        if of_rollouts:
            check_ages(x, policy.num_steps)
        await anyio.sleep(0.002 * rng.random())
        policy.train([each.item for each in (x if of_rollouts else [x])])
        return {}

    stage: Any = prefetch(map_concurrent(answer, range(num_items), 8), 4)
    if of_rollouts:
        stage = rollouts(
            answer, range(num_items), BATCH, concurrency=BATCH * rng.randint(1, 5),
            max_staleness=MAX_STALENESS,
            when_stale=WhenStale.DROP if drops else WhenStale.WAIT,
            accept=(lambda result: result.item % 5 > 0) if drops else None,
        )  # fmt: skip
    creator = SharedSessionCreator(FunctionSessionCreator(step))

    async def work(place: int) -> None:
        hooks: list[SessionRunHook] = [] if kind == "loop" else [FeedHook(stage, "x")]
        if place == NUM_WORKERS - 1:
            hooks += saving(directory, pipe, policy.saver, save_steps=7)
            if kind == "loop":
                hooks.append(InputPositionHook(stage))
        async with MonitoredSession(hooks, creator) as session:
            if kind == "loop":
                async for x in session.batches(stage):
                    await session.run([], {"x": x})
                return
            while not session.should_stop():
                await session.run([])

    try:
        async with anyio.create_task_group() as group:
            for place in range(NUM_WORKERS):
                group.start_soon(work, place)
    except BaseException as error:
        pipe.send(("fails", repr(error)))
        raise
    num_reported = 0
    if of_rollouts:
        known = stage.statistics()
        assert isinstance(known, RolloutStatistics)
        num_reported = known.num_refused + known.num_dropped + known.num_failures
        position = FeedHook(stage, "x").state_dict()
        assert (position["place"], position["beyond"]) == (num_items, [])
        assert drops or num_reported == 0
    pipe.send(("ends", policy.items, num_reported))
