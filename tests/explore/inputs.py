"""Promises of what trainings read, as programs that check themselves in whatever order they run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    MonitoredSession,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.data import WhenStale, map_concurrent, prefetch, repeat, rollouts
from asynchooks.simulation import Simulation

from .training import (
    NUM_WORKERS,
    Model,
    Program,
    Waiting,
    directory_of,
    train,
    workers,
)


class Numbers:
    """The numbers below `num`, one each second, and nothing for a second before the end."""

    def __init__(self, simulation: Simulation, num: int) -> None:
        self.simulation, self.num = simulation, num
        self.num_open = self.num_closed = 0

    async def __aiter__(self) -> AsyncIterator[int]:
        self.num_open += 1
        assert self.num_open == 1, "a source is open twice"
        try:
            for number in range(self.num):
                await self.simulation.sleep(1.0)
                yield number
            await self.simulation.sleep(1.0)
        finally:
            self.num_open -= 1
            self.num_closed += 1


async def each_item_once(simulation: Simulation) -> None:
    """Three lives of two workers; each goes on at the last checkpoint, the last one to the end."""
    counts = np.zeros(5)
    saver, place = StateDictSaver(model={"counts": counts}), directory_of(simulation)

    async def step(row: int) -> dict[str, Any]:
        await simulation.sleep(1.0)
        counts[row] += 1.0
        return {}

    async def worker(source: Any, creator: Any, last_step: int, i: int) -> None:
        hooks = [FeedHook(source, "row"), StopAtStepHook(last_step=last_step)]
        if i == 0:
            hooks.append(CheckpointSaverHook(place, save_steps=10, saver=saver))
        await train(creator, hooks)

    for last_step, name in ((2, "worker"), (4, "worker"), (10, "last")):
        counts[:] = 0.0
        source, creator = prefetch(range(5), 1), SharedSessionCreator(step, num_workers=2)
        life = partial(worker, source, creator, last_step)
        whole = await workers(simulation, life, 2, name)
        assert counts.max() <= 1.0, counts
        assert counts.sum() == min(last_step, 5) or len(whole) < 2, counts
    assert counts.min() == 1.0, counts


async def input_ends_for_all_workers(simulation: Simulation) -> None:
    """Each row is used once; whoever is cancelled leaves its row to the others."""
    used: list[int] = []
    numbers = Numbers(simulation, 4)
    source = prefetch(numbers, 1)

    async def step(row: int) -> dict[str, Any]:
        await simulation.sleep(0.75)
        used.append(row)
        return {}

    creator = SharedSessionCreator(step, num_workers=NUM_WORKERS)

    async def worker(i: int) -> None:
        await train(creator, [FeedHook(source, "row"), Waiting(simulation)])

    whole = await workers(simulation, worker)
    assert len(used) == len(set(used)), used
    # at the end, none may be left that could take what a cancelled worker gives back
    assert len(used) >= 4 - (len(whole) < NUM_WORKERS) or not whole, used
    assert numbers.num_closed == 1 or not whole, numbers.num_closed


async def loops_share_their_batches(simulation: Simulation) -> None:
    """Loops of two sessions over one stage, up to a limit: each row once, in order."""
    used: list[int] = []
    source = prefetch(range(9), 2)

    async def step(row: int) -> dict[str, Any]:
        await simulation.sleep(1.0)
        used.append(row)
        return {}

    creator = SharedSessionCreator(step, num_workers=2)

    async def worker(i: int) -> None:
        async with MonitoredSession([StopAtStepHook(last_step=5)], creator) as session:
            async for row in session.batches(source):
                await session.run([], {"row": row})

    whole = await workers(simulation, worker, 2)
    assert len(used) == len(set(used)), used
    assert len(used) == 5 or not whole, used
    assert len(whole) < 2 or max(used) <= 5, used  # one in hand at the limit


async def passes_end_once(simulation: Simulation) -> None:
    """`after_epoch` of two workers is called once for each pass, alone with the model."""
    model, ended = Model(simulation), []
    source = repeat(range(3), 2)

    async def step(row: int) -> dict[str, Any]:
        return await model.step()

    async def after_epoch(session: Any, epoch: int) -> None:
        with model.held():
            await simulation.sleep(0.5)
            ended.append(epoch)

    creator = SharedSessionCreator(step, num_workers=2)

    async def worker(i: int) -> None:
        await train(creator, [FeedHook(source, "row", after_epoch=after_epoch)])

    whole = await workers(simulation, worker, 2)
    assert ended == [0, 1][: len(ended)], ended
    assert len(ended) == 2 or len(whole) < 2, ended
    assert model.steps == 6 or len(whole) < 2, model.steps


async def takers_wait_for_one_stage(simulation: Simulation) -> None:
    """Three tasks take from one prefetch: each item goes to one, in order, and the end to all."""
    taken: list[int] = []
    numbers = Numbers(simulation, 4)
    source = prefetch(numbers, 1)
    is_closed = False

    async def taker(i: int) -> None:
        try:
            async for item in source:
                taken.append(item)
                await simulation.sleep(0.5)
        except RuntimeError:
            assert is_closed  # main was cancelled

    async with source:
        try:
            whole = await workers(simulation, taker)
        finally:
            is_closed = True
    assert taken == list(range(4))[: len(taken)], taken
    assert len(taken) == 4 or not whole, taken
    assert numbers.num_closed == 1, numbers.num_closed


async def maps_keep_items_and_their_order(simulation: Simulation) -> None:
    """Two consumers of one concurrent map; each sees its items in order."""
    taken: dict[int, list[int]] = {0: [], 1: []}
    num_calls = 0
    is_closed = False

    async def double(item: int) -> int:
        nonlocal num_calls
        num_calls += 1
        assert num_calls <= 2, "more calls than its concurrency"
        try:
            await simulation.sleep(1.0 + item % 2)
        finally:
            num_calls -= 1
        return 2 * item

    source = map_concurrent(double, range(6), concurrency=2)

    async def consumer(i: int) -> None:
        try:
            async for item in source:
                taken[i].append(item)
                await simulation.sleep(1.0)
        except RuntimeError:
            assert is_closed  # main was cancelled

    async with source:
        try:
            whole = await workers(simulation, consumer, 2)
        finally:
            is_closed = True
    assert all(each == sorted(each) for each in taken.values()), taken
    assert not whole or sorted(taken[0] + taken[1]) == list(range(0, 12, 2)), taken


def rollouts_stay_within_their_bound(num_learners: int, when_stale: WhenStale) -> Program:
    async def main(simulation: Simulation) -> None:
        ages: list[int] = []
        seen: list[int] = []

        async def rollout(prompt: int) -> int:
            await simulation.sleep(1.0 + prompt % 2)
            return prompt

        async def step(results: Any) -> dict[str, Any]:
            ages.extend(each.staleness for each in results)
            await simulation.sleep(1.0)
            seen.extend(each.result for each in results)
            return {}

        source = rollouts(
            rollout, range(6), 2, concurrency=3, max_staleness=1, when_stale=when_stale
        )
        creator = SharedSessionCreator(step, num_workers=num_learners)

        async def worker(i: int) -> None:
            await train(creator, [FeedHook(source, "results")])

        whole = await workers(simulation, worker, num_learners)
        assert max(ages, default=0) <= 1, ages
        assert len(seen) == len(set(seen)), seen
        if len(whole) == num_learners:
            assert len(seen) + source.statistics().num_dropped == 6, seen

    return main
