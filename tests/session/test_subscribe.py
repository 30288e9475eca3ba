"""session.subscribe(): statuses as they come, which end with the session and never hold it up."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    Status,
    StopAtStepHook,
    Subscription,
)
from asynchooks.simulation import Simulation

from ..simulation.engines import on_every_engine
from ..support.helpers import counting_creator, in_task, settle
from ..support.loops import anyio_backend

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio

LONG_SECS = 60.0


class LogsEachStep(SessionRunHook):
    def __init__(self) -> None:
        self.session: Any = None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.session.log_metrics({"loss": 1.0})


def logging_session(last_step: int = 3) -> MonitoredSession:
    hook = LogsEachStep()
    session = MonitoredSession([hook, StopAtStepHook(last_step=last_step)], counting_creator())
    hook.session = weakref.proxy(session)
    return session


async def train(session: MonitoredSession) -> None:
    async with session:
        while not session.should_stop():
            await session.run([])


async def follow(subscription: Subscription) -> list[Status]:
    return [status async for status in subscription]


def phases(statuses: list[Status]) -> list[str]:
    return [status.phase for status in statuses]


async def test_it_tells_each_phase_and_each_metric_and_ends_with_closed() -> None:
    session = logging_session()
    subscription = session.subscribe(every_secs=LONG_SECS)
    async with in_task(follow, subscription) as followed:
        await train(session)
    assert phases(followed.value) == ["new", "opening", *["open"] * 4, "closing", "closed"]
    assert [status.step for status in followed.value] == [0, 0, 0, 1, 2, 3, 3, 3]
    assert followed.value[-1].metrics == {"loss": 1.0}
    assert followed.value[-1].metrics_step == 3
    with pytest.raises(StopAsyncIteration):
        await anext(subscription)


async def test_several_subscriptions_are_given_the_same_statuses() -> None:
    session = logging_session()
    subscriptions = [session.subscribe(every_secs=LONG_SECS) for _ in range(3)]
    await train(session)
    first, *others = [await follow(each) for each in subscriptions]
    assert others == [first, first]


async def test_after_the_end_it_gives_the_last_status_alone() -> None:
    session = logging_session()
    await train(session)
    assert phases(await follow(session.subscribe())) == ["closed"]


async def test_an_error_ends_it_by_a_status_with_the_error() -> None:
    session = logging_session()
    async with in_task(follow, session.subscribe(every_secs=LONG_SECS)) as followed:
        with pytest.raises(ValueError, match="wrong"):
            async with session:
                await session.run([])
                raise ValueError("wrong")
    last = followed.value[-1]
    assert (last.phase, last.as_dict()["error"]) == ("closed", "ValueError('wrong')")


async def test_an_error_in_begin_ends_it() -> None:
    class Fails(SessionRunHook):
        async def begin(self) -> None:
            raise ValueError("wrong")

    session = MonitoredSession([Fails()], counting_creator())
    async with in_task(follow, session.subscribe(every_secs=LONG_SECS)) as followed:
        with pytest.raises(ValueError, match="wrong"):
            await session.open()
    assert phases(followed.value) == ["new", "opening", "closing", "closed"]


async def test_a_cancelled_session_ends_it() -> None:
    session = logging_session()
    async with in_task(follow, session.subscribe(every_secs=LONG_SECS)) as followed:
        with anyio.CancelScope() as scope:
            async with session:
                scope.cancel()
                await anyio.sleep_forever()
    assert phases(followed.value) == ["new", "opening", "open", "closing", "closed"]


async def test_one_that_does_not_read_loses_the_oldest_and_holds_nothing_up() -> None:
    session = logging_session(last_step=200)
    subscription = session.subscribe(every_secs=LONG_SECS)
    await train(session)
    assert subscription.num_dropped == 205 - 64  # 200 metrics, and five phases
    statuses = await follow(subscription)
    assert len(statuses) == 64
    assert (statuses[0].step, statuses[-1].phase) == (139, "closed")


async def test_a_side_task_that_follows_does_not_hold_up_the_end() -> None:
    session = logging_session()
    seen: list[Status] = []

    async def watch() -> None:
        seen.extend(await follow(session.subscribe(every_secs=LONG_SECS)))

    with anyio.fail_after(LONG_SECS / 2):
        async with session:
            session.start_soon(watch)
            while not session.should_stop():
                await session.run([])
                await settle()
    assert {status.step for status in seen} >= {1, 2, 3}
    assert "closed" not in phases(seen)


@pytest.mark.parametrize("stops", ["by the caller", "by a hook"])
async def test_the_task_that_opened_it_follows_to_the_stop(stops: str) -> None:
    class Stops(SessionRunHook):
        async def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
            if run_context.global_step.value == 3:
                run_context.request_stop("enough")

    hooks = [Stops()] if stops == "by a hook" else []
    session = MonitoredSession(hooks, counting_creator())

    async def steps() -> None:
        while not session.should_stop():
            await session.run([])
            await anyio.lowlevel.checkpoint()
            if stops == "by the caller" and session.global_step.value == 3:
                session.request_stop("enough")

    with anyio.fail_after(20):
        async with session, anyio.create_task_group() as group:
            group.start_soon(steps)
            statuses = await follow(session.subscribe(every_secs=0.01))
    assert set(phases(statuses)) == {"open"}
    assert session.status().step == 3


async def test_aclose_in_another_task_ends_the_wait() -> None:
    async with logging_session() as session:
        subscription = session.subscribe(every_secs=LONG_SECS)
        await anext(subscription)
        async with in_task(follow, subscription) as followed:
            await subscription.aclose()
        assert followed.value == []
        await session.run([])
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)


async def test_a_cancelled_wait_loses_no_status() -> None:
    async with logging_session() as session:
        subscription = session.subscribe(every_secs=LONG_SECS)
        await anext(subscription)
        with anyio.CancelScope() as scope:
            async with in_task(settle):
                scope.cancel()
            await anext(subscription)
        await session.run([])
        assert (await anext(subscription)).step == 1


async def test_two_tasks_on_one_subscription_are_refused() -> None:
    async with logging_session() as session:
        subscription = session.subscribe(every_secs=LONG_SECS)
        await anext(subscription)
        async with in_task(anext, subscription) as waiting:
            with pytest.raises(RuntimeError, match="make one for each: session.subscribe"):
                await anext(subscription)
            await session.run([])
    assert waiting.value.step == 1


async def test_one_that_was_left_is_forgotten() -> None:
    async with logging_session() as session:
        async for _ in session.subscribe():
            break
        kept = session.subscribe()
        gc.collect()
        assert [each() for each in session._board.subscriptions] == [kept]
        await kept.aclose()
        del kept
        gc.collect()
        assert session._board.subscriptions == []


async def test_one_that_was_closed_may_be_freed_while_statuses_are_given() -> None:
    async with logging_session() as session:
        subscription = session.subscribe()
        given = list(session._board.subscriptions)  # as the thread has them that gives
        await subscription.aclose()
        del subscription  # an error that Python ignores here fails the test
        gc.collect()
        assert [each() for each in given] == [None]


async def test_it_does_not_keep_the_session_and_ends_when_that_is_dropped() -> None:
    session = await logging_session().open()
    subscription, seen = session.subscribe(every_secs=LONG_SECS), weakref.ref(session)
    await anext(subscription)
    async with in_task(follow, subscription) as followed:
        with pytest.warns(ResourceWarning, match="was dropped"):
            del session  # freed at once
        assert seen() is None
    assert followed.value == []


async def test_a_session_that_was_asked_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        session = MonitoredSession([], counting_creator())
        async with session:
            session.status()
            await session.subscribe().aclose()
        seen = weakref.ref(session)
        del session
        assert seen() is None
    finally:
        gc.enable()


async def test_statuses_that_never_cease_do_not_hold_the_loop() -> None:
    async with logging_session() as session, anyio.create_task_group() as group:
        num_seen = 0

        async def watch() -> None:
            nonlocal num_seen
            async for _ in session.subscribe():
                session.log_metrics({"reward": 1})  # so that one waits already
                num_seen += 1
                assert num_seen < 100_000, "it never lets other tasks run"

        group.start_soon(watch)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert num_seen > 0


async def test_another_event_loop_in_a_thread_may_follow() -> None:
    session, ready = logging_session(), threading.Event()

    async def follow_there() -> list[Status]:
        subscription = session.subscribe(every_secs=LONG_SECS)
        first = await anext(subscription)
        ready.set()
        return [first, *await follow(subscription)]

    async with in_task(anyio.to_thread.run_sync, lambda: anyio.run(follow_there)) as there:
        await anyio.to_thread.run_sync(ready.wait)
        await train(session)
    assert phases(there.value) == ["new", "opening", *["open"] * 4, "closing", "closed"]


async def test_a_loop_that_has_ended_holds_nothing_up() -> None:
    session = logging_session()
    kept = []

    async def begin_to_follow() -> None:
        kept.append(session.subscribe(every_secs=LONG_SECS))
        await anext(kept[0])
        with anyio.move_on_after(0.01):
            await anext(kept[0])

    await anyio.to_thread.run_sync(lambda: anyio.run(begin_to_follow))
    await train(session)
    assert phases(await follow(kept[0]))[-1] == "closed"


@on_every_engine
def test_it_gives_one_every_so_many_seconds(backend: Any) -> None:
    simulation, seen = Simulation(backend=backend), []

    async def watch(session: MonitoredSession) -> None:
        async for status in session.subscribe(every_secs=2.0):
            seen.append((simulation.now, status.phase))

    async def main() -> None:
        session = MonitoredSession([], counting_creator())
        task = simulation.start(watch, session)
        await simulation.sleep(1.0)
        async with session:
            await simulation.sleep(5.0)
        await task.wait()

    simulation.run(main)
    assert seen == [
        (0.0, "new"), (1.0, "opening"), (1.0, "open"), (3.0, "open"), (5.0, "open"),
        (6.0, "closing"), (6.0, "closed"),
    ]  # fmt: skip


@pytest.mark.parametrize("secs", [0, -1.0, float("inf"), "1"])
async def test_a_wrong_period_is_refused(secs: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="every_secs is"):
        logging_session().subscribe(every_secs=secs)
