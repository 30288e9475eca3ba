"""Promises of what trainings read, as programs that check themselves in whatever order they run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FeedHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import WhenStale, map_concurrent, prefetch, repeat, rollouts, shielded
from asynchooks.simulation import Simulation

from ..support.moments import at
from .training import (
    Boom,
    Model,
    Program,
    Waiting,
    directory_of,
    train,
    train_together,
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
    """Two lives of two workers; the second goes on at the last checkpoint, to the end."""
    counts = np.zeros(3)
    saver, place = StateDictSaver(model={"counts": counts}), directory_of(simulation)

    async def step(row: int) -> dict[str, Any]:
        await simulation.sleep(1.0)
        counts[row] += 1.0
        return {}

    async def worker(source: Any, creator: Any, last_step: int, i: int) -> None:
        hooks: list[SessionRunHook] = [StopAtStepHook(last_step=last_step)]
        if i == 0:
            hooks.append(CheckpointSaverHook(place, save_steps=1, saver=saver))
        else:
            # another worker may save meanwhile
            hooks.append(at(after_run=lambda *_: simulation.sleep(0.0)))
        await train(creator, [*hooks, FeedHook(source, "row")])

    for last_step, name in ((2, "worker"), (9, "last")):
        counts[:] = 0.0
        source, creator = prefetch(range(3), 1), SharedSessionCreator(step, num_workers=2)
        life = partial(worker, source, creator, last_step)
        whole = await workers(simulation, life, 2, name)
        assert counts.max() <= 1.0, counts
        assert simulation.now <= 7.0, simulation.now  # a lost session takes up to two steps
        assert counts.sum() == min(last_step, 3) or len(whole) < 2, counts
    assert counts.min() == 1.0, counts


async def input_ends_for_all_workers(simulation: Simulation) -> None:
    """Each row is used once; whoever is cancelled leaves its row to the others.

    One that opens after the end reads nothing once more.
    """
    used: list[int] = []
    numbers = Numbers(simulation, 3)
    source = prefetch(numbers, 1)

    async def step(row: int) -> dict[str, Any]:
        await simulation.sleep(0.75)
        used.append(row)
        return {}

    creator = SharedSessionCreator(step, num_workers=3)

    async def worker(i: int) -> None:
        if i == 2:
            await simulation.sleep(4.25)
        waiting = [Waiting(simulation)] if i == 0 else []
        await train(creator, [FeedHook(source, "row"), *waiting])

    whole = await workers(simulation, worker, 3)
    assert len(used) == len(set(used)), used
    # at the end, none may be left that could take what a cancelled worker gives back
    assert len(used) >= 3 - (len(whole) < 3) or not whole, used
    assert numbers.num_closed == 1 or not whole, numbers.num_closed


def rows_are_given_back(secs: float) -> Program:
    """By a worker that leaves with its first row in hand, at once to another one that waits."""

    async def main(simulation: Simulation) -> None:
        used: dict[int, float] = {}

        async def rows() -> AsyncIterator[int]:
            for row in range(3):
                yield row
            await simulation.sleep(9.0)

        async def step(row: int) -> dict[str, Any]:
            await simulation.sleep(1.0)
            assert row not in used
            used[row] = simulation.now
            return {}

        async def leave(run_context: Any) -> None:
            if secs:
                await simulation.sleep(secs)
            raise StopTraining

        creator, source = SharedSessionCreator(step, num_workers=2), prefetch(rows(), 1)
        leaving, staying = [FeedHook(source, "row"), at(before_run=leave)], FeedHook(source, "row")
        whole = await train_together(simulation, creator, leaving, [staying], last_step=None)
        if len(whole) == 2:
            assert sorted(used.values()) == [1.0, 2.0, max(3.0, secs + 1.0)], used

    return main


def the_limit_ends_waits_for_items(by_loop: bool) -> Program:
    """Also one that another worker brings along later, and reaches; a loop then ends."""

    async def main(simulation: Simulation) -> None:
        model, looped = Model(simulation), list[int]()

        async def never() -> AsyncIterator[dict[str, Any]]:
            await simulation.sleep(9.0)
            yield {}

        creator = SharedSessionCreator(model.step, num_workers=2)

        async def reads() -> None:
            if not by_loop:
                await train(creator, [FeedHook(never())])
                return
            async with MonitoredSession([], creator) as session:
                async for _ in session.batches(never()):
                    pass
                looped.append(model.steps)

        async def worker(i: int) -> None:
            await simulation.sleep(0.5 * i)
            await (train(creator, [StopAtStepHook(last_step=1)]) if i else reads())

        whole = await workers(simulation, worker, 2)
        if len(whole) == 2:
            assert (simulation.now <= 1.5, looped) == (True, [1] * by_loop), simulation.now

    return main


def items_wait_for_a_late_restore(secs: float) -> Program:
    """Another worker draws its first item at 0.5 s: a restore ends before that, or is refused."""

    async def main(simulation: Simulation) -> None:
        drawn: list[float] = []
        refused: list[CheckpointError] = []
        is_restoring = is_gone = False

        async def numbers() -> AsyncIterator[int]:
            for number in range(2):
                assert not is_restoring, "an item is drawn while the model is restored"
                drawn.append(simulation.now)
                yield number

        async def step(row: int) -> dict[str, Any]:
            await simulation.sleep(1.0)
            return {}

        class Restores(SessionRunHook):
            async def restore_model(self, session: Any) -> int:
                nonlocal is_restoring
                assert is_gone or not drawn, "a model is restored while others draw items"
                is_restoring = True
                try:
                    await simulation.sleep(0.5)
                finally:
                    is_restoring = False
                return 0

        creator = SharedSessionCreator(step)
        source = prefetch(numbers(), 1)

        async def reads() -> None:
            nonlocal is_gone
            hooks = [FeedHook(source, "row"), at(before_run=lambda _: simulation.sleep(1.0))]
            try:
                async with MonitoredSession(hooks, creator) as session:
                    await simulation.sleep(0.5)
                    while not session.should_stop():
                        await session.run([])
            finally:
                is_gone = True

        async def restores() -> None:
            await simulation.sleep(secs)
            try:
                async with MonitoredSession([Restores()], creator):
                    pass
            except CheckpointError as error:
                refused.append(error)

        async def worker(i: int) -> None:
            await (restores() if i else reads())

        whole = await workers(simulation, worker, 2)
        if len(whole) == 2:
            assert drawn[0] == (0.5 if refused else secs + 0.5), drawn
            assert secs < 0.5 or refused

    return main


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
    feeds = [[FeedHook(source, "row", after_epoch=after_epoch)] for _ in range(2)]
    whole = await train_together(simulation, creator, *feeds, last_step=None)
    assert ended == [0, 1][: len(ended)], ended
    assert len(ended) == 2 or len(whole) < 2, ended
    assert model.steps == 6 or len(whole) < 2, model.steps


async def resources_are_made_and_deleted_whole(simulation: Simulation) -> None:
    """`shielded`: whatever is cancelled, each one that is made is deleted, and nothing is cut."""
    moments: dict[int, str] = {}

    @asynccontextmanager
    async def resource(i: int) -> AsyncIterator[None]:
        moments[i] = "begins to make"
        await simulation.sleep(0.25)
        moments[i] = "made"
        try:
            yield
        finally:
            moments[i] = "begins to delete"
            await simulation.sleep(0.25)
            moments[i] = "deleted"

    async def worker(i: int) -> None:
        try:
            async with shielded(resource(i)):
                assert moments[i] == "made"
                await simulation.sleep(0.25)
        except TimeoutError:
            assert is_over  # main was cancelled, and with it the simulation

    is_over = False
    try:
        await workers(simulation, worker, 2)
    finally:
        is_over = True
    assert set(moments.values()) <= {"deleted"}, moments


async def takers_wait_for_one_stage(simulation: Simulation) -> None:
    """Three tasks take from one prefetch: each item goes to one, in order, and the end to all."""
    taken: list[int] = []
    numbers = Numbers(simulation, 4)
    source = prefetch(numbers, 1)

    async def taker(i: int) -> None:
        async for item in source:
            taken.append(item)
            await simulation.sleep(0.5)

    async with source:
        whole = await workers(simulation, taker)
    assert taken == list(range(4))[: len(taken)], taken
    assert len(taken) == 4 or not whole, taken
    assert numbers.num_closed == 1, numbers.num_closed


async def maps_keep_items_and_their_order(simulation: Simulation) -> None:
    """Two consumers of one concurrent map; each sees its items in order."""
    taken: dict[int, list[int]] = {0: [], 1: []}
    num_calls = 0

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
        async for item in source:
            taken[i].append(item)
            await simulation.sleep(1.0)

    async with source:
        whole = await workers(simulation, consumer, 2)
    assert all(each == sorted(each) for each in taken.values()), taken
    assert not whole or sorted(taken[0] + taken[1]) == list(range(0, 12, 2)), taken


async def a_map_fails_behind_its_results(simulation: Simulation) -> None:
    """The error of item 3 comes when the results before it were taken, and no call is left."""
    taken: list[int] = []
    num_errors = num_calls = 0

    async def double(item: int) -> int:
        nonlocal num_calls
        num_calls += 1
        try:
            await simulation.sleep(1.0 if item == 0 else 0.5)
        finally:
            num_calls -= 1
        if item == 3:
            raise Boom
        return 2 * item

    async def consumer(i: int) -> None:
        nonlocal num_errors
        try:
            async for item in source:
                taken.append(item)
        except Boom:
            num_errors += 1

    source = map_concurrent(double, range(9), concurrency=3)
    try:
        async with source:
            whole = await workers(simulation, consumer, 2)
    finally:
        assert not num_calls, "a call goes on behind the block"
    assert taken == [0, 2, 4][: len(taken)], taken
    assert len(whole) < 2 or (num_errors == 2 and len(taken) == 3), (taken, num_errors)


def rollouts_stay_within_their_bound(num_learners: int, when_stale: WhenStale) -> Program:
    async def main(simulation: Simulation) -> None:
        ages: list[int] = []
        seen: list[int] = []
        num_trained, born = 0, {}

        async def rollout(prompt: int) -> int:
            born[prompt] = num_trained
            await simulation.sleep(1.0 + prompt % 2)
            return prompt

        async def step(results: Any) -> dict[str, Any]:
            nonlocal num_trained
            ages.extend(each.staleness for each in results)
            if num_learners == 1:
                assert all(num_trained - born[each.result] <= 1 for each in results)
            await simulation.sleep(1.0)
            num_trained += 1
            seen.extend(each.result for each in results)
            return {}

        source = rollouts(
            rollout, range(6), 2, concurrency=3, max_staleness=1, when_stale=when_stale
        )
        creator = SharedSessionCreator(step, num_workers=num_learners)
        feeds = [[FeedHook(source, "results")] for _ in range(num_learners)]
        whole = await train_together(simulation, creator, *feeds, last_step=None)
        assert max(ages, default=0) <= 1, ages
        assert len(seen) == len(set(seen)), seen
        if len(whole) == num_learners:
            assert len(seen) + source.statistics().num_dropped == 6, seen

    return main
