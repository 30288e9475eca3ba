"""rollouts when a lost model goes back to its checkpoint: each item is trained on once."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
)
from asynchooks.data import Rollout, Stage, WhenStale, rollouts

from ..hooks.inputs import Diary, saving
from ..support.markers import exhaustive

pytestmark = pytest.mark.anyio


class Learner(Diary):
    """It remembers the items of the groups it was trained with."""

    def learn(self, groups: list[Rollout]) -> Mapping[str, Any]:
        return self.step([each.item for each in groups])


def source_of(seed: int, num_items: int) -> Stage[list[Rollout]]:
    rng = random.Random(seed)

    async def answer(item: int) -> int:
        for _ in range(rng.randrange(6)):
            await anyio.lowlevel.checkpoint()
        return item

    return rollouts(
        answer, range(num_items), rng.randint(1, 4), concurrency=rng.randint(4, 9),
        max_staleness=rng.randint(0, 3), when_stale=WhenStale.WAIT,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [*range(5), *exhaustive(*range(5, 25))])
@pytest.mark.parametrize("way", ["FeedHook", "batches", "a loop that is left"])
async def test_each_item_is_trained_on_once_across_lost_models(
    tmp_path: Path, seed: int, way: str
) -> None:
    rng = random.Random(seed)
    num_items = rng.randint(5, 40)
    lost = {call: PreemptionError("lost") for call in rng.sample(range(1, 30), rng.randint(1, 4))}
    learner, source = Learner(lost), source_of(seed, num_items)
    reading = FeedHook(source, "groups") if way == "FeedHook" else InputPositionHook(source)
    hooks = [reading, saving(tmp_path, learner, every=rng.randint(1, 4))]
    async with MonitoredSession(hooks, FunctionSessionCreator(learner.learn)) as session:
        if way == "FeedHook":
            while True:
                await session.run("x")
        if way == "a loop that is left":
            async for groups in session.batches(source):
                await session.run("x", {"groups": groups})
                if rng.random() < 0.3:
                    break
        async for groups in session.batches(source):
            await session.run("x", {"groups": groups})
    assert sorted(learner.items) == list(range(num_items))


async def test_places_and_counts_go_on_over_restores(tmp_path: Path) -> None:
    """Half of the items are refused; those counts belong to the position."""
    places: list[int] = []
    for life in range(4):
        learner = Learner()

        async def answer(item: int) -> int:
            await anyio.lowlevel.checkpoint()
            return item

        source = rollouts(
            answer, range(40), 2 + life % 2, concurrency=5, max_staleness=1,
            accept=lambda result: result % 2 == 0,
        )  # fmt: skip

        def learn(groups: list[Rollout], learner: Learner = learner) -> Mapping[str, Any]:
            places.extend(each.place for each in groups)
            assert [each.place for each in groups] == [each.item for each in groups]
            return learner.learn(groups)

        hooks = [FeedHook(source, "groups"), saving(tmp_path, learner, every=1)]
        async with MonitoredSession(hooks, FunctionSessionCreator(learn)) as session:
            for _ in range(100 if life == 3 else 2):
                await session.run("x")
        if life == 3:
            assert sorted(learner.items) == sorted(places) == list(range(0, 40, 2))
            assert source.statistics().num_refused == 20
