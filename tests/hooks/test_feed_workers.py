"""FeedHook with several workers around one stage: each item is used once, whatever happens."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    InputError,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import Stage, map_concurrent, prefetch

from ..support.helpers import settle
from .inputs import SHORT_SECS, Diary, Gate, gated, until_stopped

pytestmark = pytest.mark.anyio


class FaultError(Exception):
    """What is made to happen."""


async def test_an_item_of_a_run_that_failed_is_fed_to_the_next() -> None:
    diary = Diary({2: FaultError(), 3: FaultError(), 5: FaultError()})
    async with MonitoredSession([FeedHook(range(4), "x")], diary.creator) as session:
        while not session.should_stop():
            with contextlib.suppress(FaultError):
                await session.run([])
    assert diary.items == [0, 1, 2, 3]
    assert diary.num_calls == 7


async def test_an_error_of_the_source_that_all_workers_meet_is_noted_once() -> None:
    async def fails() -> AsyncIterator[int]:
        yield 1
        raise error

    error, source = FaultError(), prefetch(fails(), 1)
    async with contextlib.AsyncExitStack() as stack:
        workers = [MonitoredSession([FeedHook(source, "x")], Diary().creator) for _ in range(3)]
        for worker in workers:
            await stack.enter_async_context(worker)
        await workers[0].run([])
        for worker in workers:
            with pytest.raises(FaultError):
                await worker.run([])
    assert error.__notes__ == [
        f"in {source._sources[0]!r}, after 1 items",
        "in before_run of FeedHook",
    ]


async def test_a_run_whose_after_run_is_never_reached_has_used_nothing() -> None:
    class Fails(Gate):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            if len(diary.items) == 2:
                raise FaultError

    diary = Diary()
    hook = FeedHook(range(3), "x")
    async with MonitoredSession([Fails(), hook], diary.creator) as session:
        await session.run([])
        with pytest.raises(FaultError):
            await session.run([])
        await until_stopped(session)
    assert diary.items == [0, 1, 1, 2]


async def test_a_lost_session_is_fed_the_same_item_again() -> None:
    diary = Diary({2: PreemptionError("lost"), 3: PreemptionError("lost"), 6: PreemptionError()})
    gate = Gate()
    async with MonitoredSession([gate, FeedHook(range(5), "x")], diary.creator) as session:
        with anyio.fail_after(SHORT_SECS):
            await until_stopped(session)
    assert diary.items == [0, 1, 2, 3, 4]
    assert gate.num_created == 4


async def test_an_item_refused_at_the_limit_goes_to_another_worker_before_all_others() -> None:
    source, diary = prefetch(range(6), 2), Diary()
    creator, hold = SharedSessionCreator(diary.creator), Gate()
    hold.before = anyio.Event()
    refused = MonitoredSession([FeedHook(source, "x"), hold], creator, step_runner="inline")

    async def train() -> None:
        async with refused:
            await refused.run([])

    limit, last = StopAtStepHook(last_step=2), StopAtStepHook(last_step=5)
    async with MonitoredSession([FeedHook(source, "x"), limit], creator) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(train)
            await settle()  # it has item 0 in hand
            await until_stopped(session)
            assert diary.items == [1, 2]
            hold.before.set()
        assert diary.items == [1, 2], "it was refused"
        async with MonitoredSession([FeedHook(source, "x"), last], creator) as another:
            await until_stopped(another)
    assert diary.items == [1, 2, 0, 3, 4]


async def test_the_limit_reached_by_another_worker_ends_a_wait_for_data() -> None:
    never, diary, left = anyio.Event(), Diary(), anyio.Event()
    source = prefetch(gated(range(9), {1: never}), 1)
    creator = SharedSessionCreator(diary.creator)
    waits = MonitoredSession([FeedHook(source, "x")], creator, step_runner="inline")

    async def train() -> None:
        async with waits:
            await until_stopped(waits)
        left.set()

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await settle()
        assert diary.items == [0]
        limit = StopAtStepHook(last_step=2)
        async with MonitoredSession([limit], creator, step_runner="inline") as session:
            await session.run([], {"x": 7})
            await settle()
            assert waits.should_stop()
            is_in_time = left.is_set()
        waits.request_stop()
    assert diary.items == [0, 7]
    assert is_in_time


@pytest.mark.parametrize("num_workers", [1, 8, 64])
@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_nothing_is_lost_and_nothing_used_twice(num_workers: int, runner: Any) -> None:
    diary = Diary()
    source, creator = prefetch(range(300), 5), SharedSessionCreator(diary.creator)

    async def worker() -> None:
        hooks = [FeedHook(source, "x")]
        async with MonitoredSession(hooks, creator, step_runner=runner) as session:
            while not session.should_stop():
                await session.run([])
                await anyio.lowlevel.checkpoint()

    with anyio.fail_after(SHORT_SECS):
        async with anyio.create_task_group() as group:
            for _ in range(num_workers):
                group.start_soon(worker)
    assert sorted(diary.items) == list(range(300))


class Chaos:
    """A step that fails, is lost, or takes its time, as a seed says; and what was used."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.used: list[int] = []
        self.source: Stage[Any] = prefetch(range(150), self.random.randrange(1, 9))

    async def step(self, x: int) -> dict[str, int]:
        for _ in range(self.random.randrange(3)):
            await anyio.lowlevel.checkpoint()
        fate = self.random.random()
        if fate < 0.1:
            raise FaultError
        if fate < 0.13:
            raise PreemptionError("lost")
        self.used.append(x)
        return {}


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_lost_under_random_failures_losses_and_cancellations(seed: int) -> None:
    chaos = Chaos(seed)
    creator = SharedSessionCreator(FunctionSessionCreator(chaos.step))
    recovery = Recovery(first_pause_secs=0.0)
    scopes: dict[int, anyio.CancelScope] = {}

    async def worker(place: int) -> None:
        while place == 0 or chaos.random.random() < 0.9:  # the first one comes back till the end
            scopes[place] = anyio.CancelScope()
            with scopes[place]:
                session = MonitoredSession(
                    [FeedHook(chaos.source, "x")], creator, recovery=recovery
                )
                async with session:
                    while not session.should_stop():
                        with contextlib.suppress(FaultError):
                            await session.run([])
                        await anyio.lowlevel.checkpoint()
                return
            await anyio.lowlevel.checkpoint()

    async def cancel_now_and_then() -> None:
        while len(chaos.used) < 120:
            for _ in range(chaos.random.randrange(5, 40)):
                await anyio.lowlevel.checkpoint()
            scopes[chaos.random.choice(sorted(scopes))].cancel()

    with anyio.fail_after(SHORT_SECS):
        # it keeps the source open, and uses what a worker had in hand that ended last
        async with MonitoredSession([FeedHook(chaos.source, "x")], creator) as session:
            async with anyio.create_task_group() as group:
                for place in range(8):
                    group.start_soon(worker, place)
                group.start_soon(cancel_now_and_then)
            while not session.should_stop():
                with contextlib.suppress(FaultError):
                    await session.run([])
    assert sorted(chaos.used) == list(range(150))


@pytest.mark.parametrize("num_workers", [2, 64])
async def test_a_source_that_fails_hangs_no_worker(num_workers: int) -> None:
    gate, diary = anyio.Event(), Diary()

    async def fail_late(x: int) -> int:
        if x == 5:
            await gate.wait()
            raise FaultError
        return x

    source = prefetch(map_concurrent(fail_late, range(99), 1), 1)
    creator = SharedSessionCreator(diary.creator)
    left: list[BaseException] = []

    async def worker() -> None:
        try:
            hooks = [FeedHook(source, "x")]
            async with MonitoredSession(hooks, creator, step_runner="inline") as session:
                await until_stopped(session)
        except FaultError as error:
            left.append(error)

    with anyio.fail_after(SHORT_SECS):
        async with anyio.create_task_group() as group:
            for _ in range(num_workers):
                group.start_soon(worker)
            await settle()
            gate.set()
    assert 1 <= len(left) <= num_workers
    assert sorted(diary.items) == [0, 1, 2, 3, 4]


async def test_an_empty_source_is_an_error_for_every_worker() -> None:
    source, creator = prefetch(list[int](), 1), SharedSessionCreator(Diary().creator)
    with pytest.raises(InputError, match="has no items"):
        async with MonitoredSession([FeedHook(source, "x")], creator) as a:
            async with MonitoredSession([FeedHook(source, "x")], creator) as b:
                with pytest.raises(InputError, match="has no items"):
                    await a.run([])
                await b.run([])
