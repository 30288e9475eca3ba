"""Which waiters are due, and which are lost as no session is left to make their step."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import (
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    SharedSessionCreator,
    StepUnreachableError,
)
from asynchooks._engine.base import Slot
from asynchooks._step.source import SourceState
from asynchooks._step.waiters import Waiters, Worker
from asynchooks.simulation import Simulation

from ..simulation.engines import on_every_engine
from ..support.helpers import counting_creator, settle


def slot() -> Slot:
    return Slot(None, "a test")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [None, 2])
def test_a_worker_that_timed_out_may_still_train(num_workers: int | None) -> None:
    waiters = Waiters(num_workers)
    first, second = Worker(), Worker()
    waiters.open(first)
    waiters.open(second)
    timed_out = waiters.add(5, slot(), first)
    timed_out.slot.is_woken = True  # its task has not run yet
    waiters.add(9, slot(), None)
    waiters.close(second)
    assert waiters.take_unreachable() == []
    waiters.leave(timed_out)
    assert waiters.take_unreachable() == []
    waiters.close(first)
    assert len(waiters.take_unreachable()) == 1


def test_no_waiter_is_lost_before_a_worker_has_opened() -> None:
    waiters = Waiters(None)
    waiters.add(5, slot(), None)
    assert waiters.take_unreachable() == []
    worker = Worker()
    waiters.open(worker)
    waiters.add(5, slot(), worker)
    assert waiters.take_unreachable() == []


def test_leaving_twice_or_after_being_taken_changes_nothing() -> None:
    waiters, worker = Waiters(None), Worker()
    waiters.open(worker)
    waiter = waiters.add(5, slot(), worker)
    assert waiters.take_due(5) == [waiter]
    waiters.leave(waiter)
    waiters.leave(waiter)
    assert worker.waits == 0
    assert len(waiters) == 0


@given(st.lists(st.tuples(st.sampled_from("alp"), st.integers(0, 9)), max_size=60))
def test_those_due_come_in_order_and_the_count_is_right(actions: list[tuple[str, int]]) -> None:
    waiters = Waiters(None)
    inside: dict[int, tuple[int, object]] = {}
    for order, (action, number) in enumerate(actions):
        if action == "a":
            inside[order] = (number, waiters.add(number, slot(), None))
        elif action == "l" and inside:
            _, waiter = inside.pop(sorted(inside)[number % len(inside)])
            waiters.leave(waiter)  # type: ignore[arg-type]
        elif action == "p":
            due = sorted((step, key) for key, (step, _) in inside.items() if step <= number)
            assert waiters.take_due(number) == [inside.pop(key)[1] for _, key in due]
        assert len(waiters) == len(inside)


def test_waiters_that_fail_on_loss_are_taken_in_order_and_the_others_stay() -> None:
    waiters, worker = Waiters(None), Worker()
    waiters.open(worker)
    late, patient, early = (waiters.add(step, slot(), worker) for step in (9, 5, 3))
    late.fails_on_loss = early.fails_on_loss = True
    assert waiters.take_failing() == [early, late]
    assert (len(waiters), waiters.next_step, worker.waits) == (1, 5, 1)
    assert waiters.take_failing() == []
    assert waiters.take_due(5) == [patient]


def test_one_that_has_left_is_not_taken() -> None:
    waiters = Waiters(None)
    first, second = waiters.add(1, slot(), None), waiters.add(2, slot(), None)
    waiters.add(3, slot(), None)
    first.fails_on_loss = second.fails_on_loss = True
    waiters.leave(second)
    assert waiters.take_failing() == [first]


def test_all_are_lost_while_the_source_is_closed_and_none_when_it_is_back() -> None:
    waiters = Waiters(None)
    for state in (SourceState.LIVE, SourceState.LOST, None):
        waiters.source_state = state
        waiters.add(1, slot(), None)
        assert waiters.take_unreachable() == []
    waiters.source_state = SourceState.CLOSED
    assert len(waiters.take_unreachable()) == 3
    waiters.source_state = SourceState.LIVE
    waiters.add(1, slot(), None)
    assert waiters.take_unreachable() == []
    waiters.is_closed = True
    assert len(waiters.take_unreachable()) == 1


ITSELF = r"in a step of <GlobalStep .*, and no other session is open .* wait for itself"
IN_STEP = r"in a step of <GlobalStep .*, and asks for global_step\.exclusive\(\): .* for itself"


def body_or_base(session: MonitoredSession) -> list[GlobalStep]:
    """The step as the session shows it, and as its creator has it."""
    return [session.global_step, session.raw_session().global_step]


@pytest.mark.anyio
@pytest.mark.parametrize("which", [0, 1])
async def test_a_lone_step_that_waits_for_its_own_is_an_error(which: int) -> None:
    async def step() -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        with pytest.raises(StepUnreachableError, match=f"global_step 3 can .*{ITSELF}"):
            await body_or_base(session)[which].wait_for(3)
        assert await session.global_step.wait_for(0) == 0
        return {"went": "on"}

    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        with anyio.fail_after(5):
            assert await session.run("went") == "on"
        assert session.global_step.statistics().tasks_waiting_for_step == 0


@pytest.mark.anyio
@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("which", [0, 1])
async def test_a_step_that_asks_to_stand_alone_is_an_error(which: int, timeout: Any) -> None:
    async def step() -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        with pytest.raises(RuntimeError, match=f"{IN_STEP}.*outside of the step function"):
            async with body_or_base(session)[which].exclusive(timeout=timeout):
                raise AssertionError("never entered")
        return {"went": "on"}

    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        with anyio.fail_after(5):
            assert await session.run("went") == "on"
        async with session.global_step.exclusive():
            pass


@pytest.mark.anyio
async def test_a_task_of_a_step_may_stand_alone_when_the_step_has_ended() -> None:
    log: list[str] = []

    async def alone() -> None:
        async with session.global_step.exclusive():
            log.append("alone")

    async def step() -> dict[str, Any]:
        group.start_soon(alone)
        await settle()
        log.append("step")
        return {}

    async with (
        MonitoredSession([], FunctionSessionCreator(step)) as session,
        anyio.create_task_group() as group,
    ):
        await session.run([])
    assert log == ["step", "alone"]


@pytest.mark.anyio
async def test_a_step_may_wait_for_the_steps_of_other_workers() -> None:
    num_calls = 0

    async def step() -> dict[str, Any]:
        nonlocal num_calls
        num_calls += 1
        return {"reached": await one.global_step.wait_for(3) if num_calls == 1 else None}

    reached = []

    async def first() -> None:
        reached.append(await one.run("reached"))

    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=2)
    async with (
        MonitoredSession([], creator) as one,
        MonitoredSession([], creator) as other,
        anyio.create_task_group() as group,
    ):
        group.start_soon(first)
        await settle()
        with anyio.fail_after(5):
            for _ in range(3):
                await other.run([])
    assert reached == [3]


@pytest.mark.anyio
async def test_a_step_that_the_others_leave_alone_waits_in_vain() -> None:
    async def step() -> dict[str, Any]:
        await one.global_step.wait_for(3)
        raise AssertionError("it came")

    async def first() -> None:
        with pytest.raises(StepUnreachableError, match="no session is left to move"):
            await one.run([])

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    async with MonitoredSession([], creator) as one, anyio.create_task_group() as group:
        async with MonitoredSession([], creator):
            group.start_soon(first)
            await settle()


@pytest.mark.anyio
async def test_a_wait_with_a_timeout_in_a_step_is_not_refused() -> None:
    async def step() -> dict[str, Any]:
        return {"reached": await session.global_step.wait_for(3, timeout=60.0)}

    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, [])
            await settle()
            session.global_step.publish(3)


@pytest.mark.anyio
async def test_an_async_step_may_wait_for_a_step_that_is_moved_by_publish_alone() -> None:
    async def step() -> dict[str, Any]:
        return {"reached": await counter.wait_for(1)}

    counter, reached = GlobalStep(published_only=True), []

    async def run() -> None:
        reached.append(await session.run("reached"))

    creator = FunctionSessionCreator(step, global_step=counter)
    async with MonitoredSession([], creator) as session, anyio.create_task_group() as group:
        group.start_soon(run)
        await settle()
        counter.publish(1)
    assert reached == [1]


@on_every_engine
def test_waits_of_all_bodies_fail_after_a_while(backend: Any) -> None:
    simulation, log = Simulation(backend=backend), []
    creator = SharedSessionCreator(counting_creator(), num_workers=2)

    async def body(num_runs: int, until: int) -> None:
        async with MonitoredSession([], creator) as session:
            for _ in range(num_runs):
                await session.run([])
            try:
                await session.global_step.wait_for(until)
            except StepUnreachableError:
                log.append((until, simulation.now))

    async def main() -> None:
        tasks = [simulation.start(body, 0, 5), simulation.start(body, 2, 9)]
        await simulation.sleep(1e3)
        assert all([await task.wait(0.0) for task in tasks])

    simulation.run(main)
    assert sorted(log) == [(5, 30.0), (9, 30.0)]


@on_every_engine
def test_the_wait_of_a_body_that_is_left_alone_fails(backend: Any) -> None:
    simulation, log = Simulation(backend=backend), []
    creator = SharedSessionCreator(counting_creator())

    async def trains() -> None:
        async with MonitoredSession([], creator) as session:
            for _ in range(4):
                await session.run([])
                await simulation.sleep(20.0)

    async def main() -> None:
        async with MonitoredSession([], creator) as session:
            simulation.start(trains)
            await simulation.sleep(0.0)
            assert await session.global_step.wait_for(4) == 4
            with pytest.raises(StepUnreachableError):
                await session.global_step.wait_for(5)
            log.append(simulation.now)

    simulation.run(main)
    assert log == [90.0]


@on_every_engine
def test_a_body_may_wait_for_the_tasks_that_run_its_sessions_steps(backend: Any) -> None:
    simulation, reached = Simulation(backend=backend), []
    creator = SharedSessionCreator(counting_creator(), num_workers=2)

    async def trains(session: MonitoredSession, begin: float) -> None:
        await simulation.sleep(begin)
        while not session.should_stop():
            await session.run([])
            await simulation.sleep(50.0)

    async def body(begin: float) -> None:
        async with MonitoredSession([], creator) as session:
            task = simulation.start(trains, session, begin)
            reached.append(await session.global_step.wait_for(7))
            reached.append(await session.global_step.wait_for(20))
            session.request_stop()
            await task.wait()

    async def main() -> None:
        tasks = [simulation.start(body, begin) for begin in (0.0, 20.0)]
        for task in tasks:
            await task.wait()

    simulation.run(main)
    assert sorted(reached) == [7, 7, 20, 20]


@on_every_engine
def test_the_wait_of_a_body_goes_on_while_another_task_is_in_a_run(backend: Any) -> None:
    simulation, reached = Simulation(backend=backend), []

    async def step() -> dict[str, Any]:
        await simulation.sleep(100.0)
        return {}

    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=1)

    async def main() -> None:
        async with MonitoredSession([], creator) as session:
            task = simulation.start(session.run, [])
            reached.append(await session.global_step.wait_for(1))
            await task.wait()

    simulation.run(main)
    assert reached == [1]


@on_every_engine
def test_a_body_with_a_timeout_gets_its_timeout(backend: Any) -> None:
    simulation = Simulation(backend=backend)
    creator = SharedSessionCreator(counting_creator(), num_workers=1)

    async def main() -> None:
        async with MonitoredSession([], creator) as session:
            with pytest.raises(TimeoutError):
                await session.global_step.wait_for(1, timeout=100.0)
            assert simulation.now == 100.0
            await session.run([])
            assert await session.global_step.wait_for(1) == 1

    simulation.run(main)


@on_every_engine
def test_a_body_waits_on_for_a_step_that_is_moved_by_publish_alone(backend: Any) -> None:
    simulation, step = Simulation(backend=backend), GlobalStep(num_workers=1, published_only=True)
    creator = FunctionSessionCreator(lambda: {"loss": 1.0}, global_step=step)

    async def publish() -> None:
        await simulation.sleep(100.0)
        step.publish(1)

    async def main() -> None:
        async with MonitoredSession([], creator) as session:
            task = simulation.start(publish)
            assert await session.global_step.wait_for(1) == 1
            await task.wait()

    simulation.run(main)


@on_every_engine
def test_other_tasks_may_wait_in_place_of_the_body(backend: Any) -> None:
    """Also a side task: the body is free to run the steps."""
    simulation, reached = Simulation(backend=backend), []
    creator = SharedSessionCreator(counting_creator(), num_workers=1)

    async def main() -> None:
        async with MonitoredSession([], creator) as session:

            async def side() -> None:
                reached.append(await session.global_step.wait_for(1))

            session.start_soon(side)
            await simulation.sleep(100.0)
            await session.run([])
            await simulation.sleep(1.0)

    simulation.run(main)
    assert reached == [1]


@on_every_engine
def test_a_lone_body_is_warned_of(backend: Any, caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(backend=backend)

    async def main() -> None:
        async with MonitoredSession([], counting_creator()) as session:

            async def publish() -> None:
                await simulation.sleep(100.0)
                session.global_step.publish(3)

            simulation.start(publish)
            assert await session.global_step.wait_for(3) == 3

    with caplog.at_level(logging.WARNING, "asynchooks"):
        simulation.run(main)
    assert "All open workers wait for global_step 3" in caplog.text
