"""The end of rollouts, however it comes: sources are closed, and no task, thread or box is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks import FeedHook, FunctionSessionCreator, GlobalStep, MonitoredSession
from asynchooks.data import WhenStale, rollouts, shielded
from asynchooks.simulation import DeadlockError

from ...support.afterwards import nothing_left
from ...support.loops import anyio_backend as anyio_backend  # on three event loops
from ..sources import Source, on_asyncio
from .learning import Learner, known, on_engines


class EndError(Exception):
    pass


async def turns(number: int) -> None:
    for _ in range(number):
        await anyio.lowlevel.checkpoint()


class Boxes:
    """Resources whose creation and deletion take a few turns of the event loop."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_created = 0

    @asynccontextmanager
    async def box(self) -> AsyncIterator[None]:
        self.num_open += 1
        self.num_created += 1
        await turns(3)
        try:
            yield
        finally:
            await turns(3)
            self.num_open -= 1


@pytest.mark.anyio
@pytest.mark.parametrize("why", ["data", "left", "error", "error of accept", "cancel"])
@pytest.mark.parametrize("kind", ["items", "items_in_thread", "items_in_group"])
async def test_the_source_is_closed_and_nothing_is_left(kind: str, why: str) -> None:
    boxes = Boxes()

    async def answer(item: int) -> int:
        async with shielded(boxes.box()):
            await turns(1 + item % 4)
            if why == "error" and item == 11:
                raise EndError
        return item

    def accept(item: int) -> bool:
        if why == "error of accept" and item == 11:
            raise EndError
        return True

    async def read(stage: Any) -> None:
        num_batches = 0
        async with stage:
            async for _ in stage:
                num_batches += 1
                if num_batches == 3 and why == "left":
                    break
                if num_batches == 3 and why == "cancel":
                    scope.cancel()

    async with nothing_left():
        source = Source(40)
        stage = rollouts(
            answer, getattr(source, kind)(), 2, concurrency=6, max_staleness=2, accept=accept
        )
        with anyio.fail_after(20):
            with anyio.CancelScope() as scope:
                if why.startswith("error"):
                    with pytest.raises(EndError):
                        await read(stage)
                else:
                    await read(stage)
        assert source.is_closed
        assert boxes.num_open == 0
        assert boxes.num_created >= 6


@pytest.mark.anyio
@on_asyncio
@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 4, 5, 7, 9, 12, 17, 25, 40])
async def test_a_learner_that_asyncio_cancels_leaves_no_box(num_turns: int) -> None:
    boxes, rng = Boxes(), random.Random(num_turns)

    async def answer(item: int) -> int:
        async with asyncio.TaskGroup() as group:  # samples
            for _ in range(3):
                group.create_task(sample())
        return item

    async def sample() -> None:
        async with shielded(boxes.box()):
            await turns(rng.randint(0, 6))

    async def step(groups: Any) -> dict[str, float]:
        await turns(2)
        return {}

    async def learn() -> None:
        stage = rollouts(
            answer, range(1000), 2, concurrency=10, max_staleness=2, when_stale=WhenStale.DROP
        )
        hooks = [FeedHook(stage, "groups")]
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            while True:
                await session.run([])

    async with nothing_left():
        task = asyncio.create_task(learn())
        await turns(num_turns)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert boxes.num_open == 0


@pytest.mark.anyio
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plans=st.lists(st.integers(0, 30) | st.none(), min_size=1, max_size=4),
    size=st.integers(1, 3),
    bound=st.integers(0, 3),
    when_stale=st.sampled_from(list(WhenStale)),
    seed=st.integers(0, 99),
)
async def test_several_readers_get_each_result_once_whichever_are_cancelled(
    plans: list[int | None], size: int, bound: int, when_stale: WhenStale, seed: int
) -> None:
    rng, version = random.Random(seed), GlobalStep()
    got: list[int] = []

    async def answer(item: int) -> int:
        await turns(rng.randint(0, 9))
        return item

    async def read(cancel_after: int | None) -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                if cancel_after is not None:
                    group.start_soon(cancel, scope, cancel_after)
                async for groups in stage:
                    got.extend(each.place for each in groups)
                    version.publish(version.value + 1)
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()

    async def cancel(scope: anyio.CancelScope, after: int) -> None:
        await turns(after)
        scope.cancel()

    stage = rollouts(
        answer, range(25), size, concurrency=size + 4, max_staleness=bound, when_stale=when_stale,
        version=version,
    )  # fmt: skip
    with anyio.fail_after(20):
        async with stage:
            async with anyio.create_task_group() as group:
                for each in plans:
                    group.start_soon(read, each)
            await read(None)
    dropped = known(stage).num_dropped
    assert len(got) == len(set(got)) == 25 - dropped
    assert when_stale is WhenStale.DROP or dropped == 0


@on_engines
def test_a_learner_that_waits_for_ever_is_found_by_the_simulation(backend: Any) -> None:
    learner = Learner(backend)

    async def main() -> None:
        async with rollouts(learner.answer, range(99), 2, concurrency=4, max_staleness=1) as stage:
            await anext(stage)
            await GlobalStep().wait_for(1)

    with pytest.raises(DeadlockError):
        learner.run(main)
    assert learner.now < 10


@on_engines
def test_a_stage_that_nothing_is_asked_of_begins_no_call(backend: Any) -> None:
    learner, begun = Learner(backend), list[int]()

    async def answer(item: int) -> int:
        begun.append(item)
        return item

    async def main() -> None:
        async with rollouts(answer, range(99), 2, concurrency=4, max_staleness=1) as stage:
            await learner.sleep(10.0)
            assert begun == []
            await anext(stage)
            assert begun == [0, 1, 2, 3]

    learner.run(main)


@pytest.mark.parametrize("backend", ["asyncio"])
def test_a_call_whose_wait_fails_as_it_is_dropped_is_cancelled_at_its_next_one(
    backend: Any,
) -> None:
    learner = Learner(backend)
    futures: list[asyncio.Future[None]] = []
    ended: list[float] = []

    async def answer(item: int) -> int:
        if item == 0:
            futures.append(asyncio.get_running_loop().create_future())
            try:
                try:
                    await futures[0]
                except EndError:
                    await learner.sleep(1e6)  # it tries another engine
            finally:
                ended.append(learner.now)
        await learner.sleep(1.0)
        return item

    def accept(item: int) -> bool:
        if item == 2:  # the batch with it drops item 0
            futures[0].set_exception(EndError())
        return True

    async def main() -> None:
        stage = rollouts(
            answer, range(9), 1, concurrency=2, max_staleness=1, when_stale=WhenStale.DROP,
            accept=accept,
        )  # fmt: skip
        await learner.train(stage)
        assert known(stage).num_dropped == 1

    learner.run(main)
    assert ended == [3.0]  # when the third batch was put together
