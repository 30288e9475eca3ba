"""rollouts under learners of other shapes, and cancellations that meet those of a call's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import Rollout, WhenStale, rollouts, shielded
from asynchooks.simulation import Simulation

from ...support.helpers import settle

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def simulation(request: pytest.FixtureRequest) -> Simulation:
    return Simulation(backend=request.param)


async def echo(item: int) -> int:
    await anyio.lowlevel.checkpoint()
    return item


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
async def test_several_batches_may_make_one_step(max_staleness: int) -> None:
    """Gradients of two batches are accumulated: the global step moves with each second run."""
    trained: list[int] = []

    def step(groups: list[Rollout]) -> dict[str, int]:
        trained.extend(each.item for each in groups)
        assert all(each.staleness <= max_staleness for each in groups)
        return {"global_step": len(trained) // 4}

    source = rollouts(echo, range(80), 2, concurrency=6, max_staleness=max_staleness)
    creator = FunctionSessionCreator(step)
    with anyio.fail_after(10):
        async with MonitoredSession([FeedHook(source, "groups")], creator) as session:
            while True:
                await session.run([])
    assert sorted(trained) == list(range(80))
    assert session.global_step.value == 20


async def test_an_open_stage_serves_one_training_after_the_other() -> None:
    trained: list[int] = []

    def step(groups: list[Rollout]) -> dict[str, int]:
        trained.extend(each.item for each in groups)
        return {}

    async with rollouts(echo, range(1000), 2, concurrency=4, max_staleness=0) as source:
        with anyio.fail_after(10):
            for _ in range(3):
                hooks = [FeedHook(source, "groups"), StopAtStepHook(last_step=5)]
                async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
                    while not session.should_stop():
                        await session.run([])
            by_hand = [each.item for _ in range(3) for each in await anext(source)]
    assert trained + by_hand == list(range(36))


async def test_a_batch_that_was_not_taken_has_not_been_trained_on() -> None:
    """The reader is cancelled at each turn; at one of them its batch is made and lies there."""
    lies_there = []
    for num_turns in range(8):
        weights = 0
        seen: dict[int, int] = {}
        go = anyio.Event()

        async def answer(item: int, seen: dict[int, int] = seen, go: anyio.Event = go) -> int:
            seen[item] = weights  # noqa: B023 - it is called while the loop is here
            await go.wait()
            return item

        source: Any = rollouts(answer, range(8), 2, concurrency=2, max_staleness=0)
        async with source, anyio.create_task_group() as group:
            first: list[list[Rollout]] = []

            async def read(first: list[list[Rollout]] = first, source: Any = source) -> None:
                first.append(await anext(source))

            group.start_soon(read)
            await settle()
            go.set()
            for _ in range(num_turns):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await settle()
                lies_there.append(len(source._ready))
                for trained in range(len(first), 3):
                    weights = trained
                    batch = await anext(source)
                    await settle()  # calls begin
                    assert [trained - seen[each.item] for each in batch] == [0, 0]
    assert 1 in lies_there


@pytest.mark.parametrize("when_stale", [WhenStale.WAIT, WhenStale.DROP])
def test_a_timeout_within_a_shield_does_not_use_up_the_cancellation(
    simulation: Simulation,
    when_stale: WhenStale,
) -> None:
    """The call is cancelled behind its shield, not left to go on for its 30 s."""
    ends: list[tuple[float, str]] = []

    async def answer(item: int) -> int:
        if item < 2:
            return item
        try:
            with anyio.CancelScope(shield=True), anyio.move_on_after(3.0):
                await anyio.sleep(50.0)
            await anyio.sleep(20.0)
        except anyio.get_cancelled_exc_class():
            ends.append((simulation.now, "cancelled"))
            raise
        ends.append((simulation.now, "went on"))
        return item

    async def main() -> None:
        async with rollouts(
            answer, range(4), 2, concurrency=4, max_staleness=0, when_stale=when_stale
        ) as source:
            await anext(source)
            with anyio.move_on_after(1.0):
                await anext(source)

    simulation.run(main)
    assert ends == [(3.0, "cancelled")] * 2


def test_the_end_waits_for_no_sandbox_longer_than_its_service_takes(
    simulation: Simulation,
) -> None:
    """Half of the sandboxes are being created, and half are in use, when training stops."""
    live: set[int] = set()

    @asynccontextmanager
    async def sandbox(item: int) -> AsyncIterator[int]:
        live.add(item)
        await anyio.sleep(0.2 if item % 2 else 2.0)
        await anyio.lowlevel.checkpoint()
        try:
            yield item
        finally:
            await anyio.lowlevel.checkpoint()
            await anyio.sleep(0.3)
            live.discard(item)

    async def answer(item: int) -> int:
        async with shielded(sandbox(item)):
            await anyio.lowlevel.checkpoint()
            await anyio.sleep(0.1 if item < 2 else 60.0)
        return item

    async def main() -> float:
        source = rollouts(answer, range(1000), 1, concurrency=50, max_staleness=60)
        hooks = [FeedHook(source, "groups"), StopAtStepHook(last_step=1)]
        creator = FunctionSessionCreator(lambda groups: {})
        async with MonitoredSession(hooks, creator) as session:
            await session.run([])
            stopped = simulation.now
        return simulation.now - stopped

    assert simulation.run(main) <= 2.0 + 0.3
    assert not live


async def wait_for_batch(answer: Callable[[int], Awaitable[int]], secs: float) -> None:
    """Wait for the first batch, for so long; then close the stage."""
    async with rollouts(answer, range(4), 2, concurrency=2, max_staleness=0) as source:
        with anyio.move_on_after(secs):
            await anext(source)


def test_a_plain_clean_up_of_a_cancelled_call_is_not_cancelled_again(
    simulation: Simulation,
) -> None:
    log: list[tuple[float, str]] = []

    async def answer(item: int) -> int:
        try:
            await anyio.sleep(60.0)
        finally:
            await anyio.lowlevel.checkpoint()
            await anyio.sleep(5.0)
            log.append((simulation.now, "deleted"))
        return item

    simulation.run(partial(wait_for_batch, answer, 1.0))
    assert log == [(6.0, "deleted")] * 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_error_of_a_call_counts_as_its_failure(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine's client aborts a request: what it awaited was cancelled, not the call."""

    async def answer(item: int) -> int:
        if item == 3:
            aborted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            aborted.cancel()
            await aborted
        return await echo(item)

    async with rollouts(
        answer, range(8), 2, concurrency=4, max_staleness=1, max_failures=1
    ) as source:
        got = [each.item async for batch in source for each in batch]
    assert sorted(got) == [0, 1, 2, 4, 5, 6, 7]
    assert source.statistics().num_failures == 1

    async def train(stage: Any) -> None:
        async with stage as batches:
            async for _ in batches:
                pass

    with pytest.raises(RuntimeError, match=r"rollouts called what raised CancelledError") as caught:
        await train(rollouts(answer, range(8), 2, concurrency=4, max_staleness=1))
    assert "in rollouts, at item 3: 3" in caught.value.__notes__


async def test_what_a_call_sets_in_its_context_is_not_seen_by_the_next() -> None:
    tag: ContextVar[int] = ContextVar("tag", default=-1)

    async def answer(item: int) -> int:
        before = tag.get()
        tag.set(item)
        await anyio.lowlevel.checkpoint()
        assert tag.get() == item
        return before

    async with rollouts(answer, range(12), 2, concurrency=2, max_staleness=0) as source:
        assert {each.result async for batch in source for each in batch} == {-1}


def test_no_log_asks_for_a_version_where_the_session_has_it(
    simulation: Simulation,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two workers, a bound of 0, and steps of 40 s: each waits for the steps of the other."""
    caplog.set_level(logging.INFO, logger="asynchooks")

    async def step(groups: list[Rollout]) -> dict[str, Any]:
        await simulation.sleep(40.0)
        return {}

    async def main() -> None:
        source = rollouts(echo, range(8), 2, concurrency=2, max_staleness=0)
        creator = SharedSessionCreator(FunctionSessionCreator(step))

        async def worker() -> None:
            async with MonitoredSession([FeedHook(source, "groups")], creator) as session:
                while True:
                    await session.run([])

        async with anyio.create_task_group() as group:
            group.start_soon(worker)
            group.start_soon(worker)

    simulation.run(main)
    assert simulation.now == 160.0
    assert "publish" not in caplog.text


@pytest.mark.parametrize("fails", ["before", "after"])
def test_an_error_of_a_call_that_was_cancelled_does_not_leave(
    simulation: Simulation, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One sample of a group has timed out, and another one cleans up, as training ends."""

    async def sample(secs: float, limit: float) -> None:
        with anyio.fail_after(limit):
            try:
                await anyio.sleep(secs)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(3.0)

    async def answer(item: int) -> int:
        async with anyio.create_task_group() as group:
            group.start_soon(sample, 60.0, 1.0 if fails == "before" else 3.5)
            group.start_soon(sample, 60.0, 60.0)
        return item

    simulation.run(partial(wait_for_batch, answer, 2.0))
    assert simulation.now <= 8.0
