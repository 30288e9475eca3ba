"""session.subscribe(): statuses as they come, which end with the session and never hold it up."""

import gc
import threading
import weakref
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import MonitoredSession, Status, StopAtStepHook, Subscription
from asynchooks.simulation import Simulation

from ..simulation.engines import simulated
from ..support.helpers import in_task, raises_at, settle, turns
from ..support.loops import anyio_backend as anyio_backend
from ..support.moments import at, counting
from ..support.moments import train as run_steps

ALL = ["new", "opening", *["open"] * 4, "closing", "closed"]


def subscribed(session: MonitoredSession) -> Subscription:
    """To news alone: the period is too long for the test."""
    return session.subscribe(every_secs=60.0)


def logging_session(last_step: int = 3) -> MonitoredSession:
    hooks = [at(after_run=lambda *_: session.log_metrics({"loss": 1.0})), StopAtStepHook(last_step)]
    session = counting(*hooks)
    return session


async def train(session: MonitoredSession) -> None:
    async with session:
        await run_steps(session)


async def follow(subscription: Subscription) -> list[Status]:
    return [status async for status in subscription]


def phases(statuses: list[Status]) -> list[str]:
    return [status.phase for status in statuses]


async def test_it_tells_each_phase_and_each_metric_and_ends_with_closed() -> None:
    session = logging_session()
    subscription, late = subscribed(session), subscribed(session)
    async with in_task(follow, subscription) as followed:
        await train(session)
    assert phases(followed.value) == ALL
    assert [status.step for status in followed.value] == [0, 0, 0, 1, 2, 3, 3, 3]
    assert followed.value[-1].metrics == {"loss": 1.0}
    assert followed.value[-1].metrics_step == 3
    with pytest.raises(StopAsyncIteration):
        await anext(subscription)
    assert await follow(late) == followed.value
    assert phases(await follow(session.subscribe())) == ["closed"]


@pytest.mark.parametrize("how", ["an error", "an error in begin", "a cancellation", "a drop"])
async def test_it_ends_however_the_session_ends(how: str) -> None:
    error = ValueError("wrong")
    hooks = [raises_at("begin", error)] if how == "an error in begin" else []
    session: Any = counting(*hooks)
    async with in_task(follow, subscribed(session)) as followed:
        if how == "a drop":
            await session.open()
            await settle()
            seen = weakref.ref(session)
            with pytest.warns(ResourceWarning, match="was dropped"):
                del session  # freed at once
            assert seen() is None
        elif how == "a cancellation":
            with anyio.CancelScope() as scope:
                async with session:
                    scope.cancel()
                    await anyio.sleep_forever()
        else:
            with pytest.raises(ValueError, match="wrong"):
                async with session:
                    raise error
    is_open = ["open"] * (how != "an error in begin")
    ended = [] if how == "a drop" else ["closing", "closed"]
    assert phases(followed.value) == ["new", "opening", *is_open, *ended]
    if how == "an error":
        assert followed.value[-1].as_dict()["error"] == "ValueError('wrong')"


async def test_one_that_does_not_read_loses_the_oldest_and_holds_nothing_up() -> None:
    session = logging_session(last_step=200)
    subscription = subscribed(session)
    await train(session)
    assert subscription.num_dropped == 205 - 64  # 200 metrics, and five phases
    statuses = await follow(subscription)
    assert len(statuses) == 64
    assert (statuses[0].step, statuses[-1].phase) == (139, "closed")


async def test_a_side_task_that_follows_does_not_hold_up_the_end() -> None:
    session, seen = logging_session(), list[Status]()

    async def watch() -> None:
        seen.extend(await follow(subscribed(session)))

    with anyio.fail_after(30):
        async with session:
            session.start_soon(watch)
            await run_steps(session)
    assert {status.step for status in seen} >= {1, 2, 3}
    assert "closed" not in phases(seen)


@pytest.mark.parametrize("by_hook", [False, True])
async def test_the_task_that_opened_it_follows_to_the_stop(by_hook: bool) -> None:
    def stop(run_context: Any, run_values: Any) -> None:
        if run_context.step == 3:
            (run_context if by_hook else session).request_stop("enough")

    session = counting(at(after_run=stop))
    with anyio.fail_after(20):
        async with session, in_task(run_steps, session):
            statuses = await follow(session.subscribe(every_secs=0.01 if by_hook else 60.0))
    assert set(phases(statuses)) <= {"open"}
    assert session.status().step == 3


async def test_a_cancelled_wait_loses_no_status_and_aclose_in_another_task_ends_the_wait() -> None:
    async with logging_session() as session:
        subscription = subscribed(session)
        await anext(subscription)
        with anyio.move_on_after(0):
            await anext(subscription)
        async with in_task(anext, subscription) as waiting:
            with pytest.raises(RuntimeError, match="make one for each: session.subscribe"):
                await anext(subscription)
            await session.run([])
        assert waiting.value.step == 1
        async with in_task(follow, subscription) as followed:
            await subscription.aclose()
        assert followed.value == []
        await session.run([])
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)


async def test_what_was_asked_or_left_is_forgotten() -> None:
    session = counting()
    async with session:
        session.status()
        subscription = session.subscribe()
        seen: list[weakref.ref[Any]] = [weakref.ref(each) for each in (session, subscription)]
        await subscription.aclose()
        del subscription  # an error that Python ignores here fails the test
    del session
    gc.collect()
    assert [each() for each in seen] == [None, None]


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
        await turns(20)
        group.cancel_scope.cancel()
    assert num_seen > 0


async def test_another_event_loop_in_a_thread_may_follow() -> None:
    session, ready = logging_session(), threading.Event()

    async def follow_there() -> list[Status]:
        subscription = subscribed(session)
        first = await anext(subscription)
        ready.set()
        return [first, *await follow(subscription)]

    async with in_task(anyio.to_thread.run_sync, lambda: anyio.run(follow_there)) as there:
        await anyio.to_thread.run_sync(ready.wait)
        await train(session)
    assert phases(there.value) == ALL


@simulated
async def test_it_gives_one_every_so_many_seconds(simulation: Simulation) -> None:
    seen: list[tuple[float, str]] = []

    async def watch(session: MonitoredSession) -> None:
        async for status in session.subscribe(every_secs=2.0):
            seen.append((simulation.now, status.phase))

    session = counting()
    task = simulation.start(watch, session)
    await simulation.sleep(1.0)
    async with session:
        await simulation.sleep(5.0)
    await task.wait()
    assert seen == [
        (0.0, "new"), (1.0, "opening"), (1.0, "open"), (3.0, "open"), (5.0, "open"),
        (6.0, "closing"), (6.0, "closed"),
    ]  # fmt: skip
