"""ProtocolHook: sessions that wait by a protocol; what they leave at their end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks._engine.current import current_engine
from asynchooks.protocols import (
    Asynchronous,
    KSync,
    ParameterServer,
    Protocol,
    ProtocolHook,
    StaleSynchronous,
    Synchronous,
)

from ..support.helpers import settle
from ..support.virtual_kernel import Trampoline
from .worlds import ALL, make_server, pause

Wait = Callable[[], Awaitable[Any]]
checkpoint = anyio.lowlevel.checkpoint


def creator_of(server: ParameterServer, worker: int, wait: Wait) -> FunctionSessionCreator:
    async def step() -> dict[str, Any]:
        parameters, version = server.pull(worker)
        is_done, _ = await server.compute(version, wait)
        if is_done:
            server.push(worker, 2.0 * parameters, version)
        return {"loss": float(np.sum(parameters**2)), "global_step": server.version}

    return FunctionSessionCreator(step, global_step=server.global_step)


def session_of(
    server: ParameterServer, worker: int, *hooks: Any, wait: Wait = checkpoint
) -> MonitoredSession:
    """A session of one worker, which is lost without a pause."""
    all_hooks = [ProtocolHook(server, worker), *hooks]
    creator, recovery = creator_of(server, worker, wait), Recovery(first_pause_secs=0)
    return MonitoredSession(all_hooks, creator, recovery=recovery)


async def run_all(session: MonitoredSession, feed: Any = None) -> int:
    """Run until the session should stop; returns how often."""
    num_runs = 0
    async with session:
        while not session.should_stop():
            await session.run("loss", feed)
            num_runs += 1
    return num_runs


async def train(server: ParameterServer, worker: int, wait: Wait, last_step: int) -> int:
    return await run_all(session_of(server, worker, StopAtStepHook(last_step=last_step), wait=wait))


async def train_shared(server: ParameterServer, worker: int, creator: Any, last_step: int) -> None:
    hooks = [ProtocolHook(server, worker), StopAtStepHook(last_step=last_step)]
    recovery = Recovery(first_pause_secs=0)
    await run_all(MonitoredSession(hooks, creator, recovery=recovery), {"worker": worker})


@pytest.mark.parametrize("backend", ["trampoline", "asyncio", "trio"])
@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_sessions_train_to_the_limit_and_leave(protocol: Protocol, backend: str) -> None:
    server = make_server(protocol, 4)
    ended: list[int] = []

    async def main() -> None:
        engine = current_engine()

        async def worker(index: int) -> None:
            await train(server, index, lambda: pause(0.001 * (1 + index % 3)), 7)
            ended.append(index)

        tasks = [engine.start(worker, index) for index in range(4)]
        for task in tasks:
            await task.wait()

    if backend == "trampoline":
        Trampoline().run(main)
    else:
        anyio.run(main, backend=backend)
    assert sorted(ended) == [0, 1, 2, 3]
    assert server.version == server.global_step.value == 7
    assert server.num_present == 0


def test_under_sessions_synchronous_updates_come_at_the_same_times() -> None:
    server = make_server(Synchronous(), 3)
    times: list[float] = []

    async def main() -> None:
        engine = current_engine()

        async def look() -> None:
            for step in range(1, 4):
                await server.global_step.wait_for(step)
                times.append(engine.now())

        async def work(index: int, secs: float) -> None:
            await train(server, index, partial(pause, secs), 3)

        tasks = [engine.start(look)]
        for index, secs in enumerate((1.0, 2.0, 5.0)):
            tasks.append(engine.start(work, index, secs))
        for task in tasks:
            await task.wait()

    Trampoline().run(main)
    assert times == [5.0, 10.0, 15.0]


@pytest.mark.anyio
async def test_a_synchronous_run_returns_when_its_gradient_is_applied() -> None:
    server = make_server(Synchronous(), 2)

    async def worker(index: int) -> None:
        async with session_of(server, index) as session:
            for num_runs in range(1, 4):
                await session.run("loss")
                assert not server.has_collected(index)
                assert server.version >= num_runs

    async with anyio.create_task_group() as group:
        for index in range(2):
            group.start_soon(worker, index)


@pytest.mark.anyio
async def test_a_server_may_be_trained_again_with_all_its_workers() -> None:
    server = make_server(Synchronous(), 2)
    for last_step in (3, 5):
        async with anyio.create_task_group() as group:
            for index in range(2):
                group.start_soon(train, server, index, checkpoint, last_step)
        assert (server.version, server.num_applied) == (last_step, 2 * last_step)


@pytest.mark.anyio
async def test_workers_may_share_a_session_creator() -> None:
    server = make_server(KSync(2), 4)

    async def step(worker: int) -> dict[str, Any]:
        parameters, version = server.pull(worker)
        await checkpoint()
        server.push(worker, parameters, version)
        return {"loss": 0.5}

    creator = SharedSessionCreator(FunctionSessionCreator(step, global_step=server.global_step))
    async with anyio.create_task_group() as group:
        for index in range(4):
            group.start_soon(train_shared, server, index, creator, 5)
    assert server.version == 5


@pytest.mark.anyio
async def test_a_session_on_another_step_is_refused() -> None:
    server = make_server(Asynchronous(), 1)
    creator = creator_of(make_server(Asynchronous(), 1), 0, checkpoint)
    with pytest.raises(RuntimeError, match=r"give both the same step: FunctionSessionCreator"):
        async with MonitoredSession([ProtocolHook(server, 0)], creator) as session:
            await session.run("loss")


def test_bad_arguments_are_refused() -> None:
    server = make_server(Asynchronous(), 2)
    with pytest.raises(TypeError, match="server is 3; give a ParameterServer"):
        ProtocolHook(3, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="worker is 2; give one from 0 to 1"):
        ProtocolHook(server, 2)


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", [Synchronous(), StaleSynchronous(0)], ids=repr)
async def test_a_worker_that_waits_ends_when_its_session_is_stopped(protocol: Protocol) -> None:
    server = make_server(protocol, 2)
    session = session_of(server, 0)
    num_runs: list[int] = []

    async def run() -> None:
        num_runs.append(await run_all(session))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await settle()  # worker 1 never comes
        session.request_stop()
    assert num_runs == [1]
    assert server.num_present == 1


@pytest.mark.anyio
async def test_a_limit_that_is_set_when_it_is_passed_ends_the_waits() -> None:
    server = make_server(Synchronous(), 2)
    server.global_step.publish(5)
    num_runs = []

    async def second() -> None:
        num_runs.append(await train(server, 1, checkpoint, 3))

    async with anyio.create_task_group() as group:
        group.start_soon(run_all, session_of(server, 0))
        await settle()
        group.start_soon(second)
    assert num_runs == [0]
    assert server.version == 5


@pytest.mark.anyio
async def test_the_others_wait_for_a_session_that_crashed_until_it_is_back() -> None:
    server = make_server(Synchronous(), 2)
    done: list[int] = []

    async def fail_once() -> None:
        if not done:
            done.append(server.version)
            raise ValueError("crashed")
        await checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(train, server, 0, checkpoint, 3)
        with pytest.raises(ValueError, match="crashed"):
            await train(server, 1, fail_once, 3)
        await settle()
        assert (server.version, server.num_present) == (0, 2)
        await train(server, 1, fail_once, 3)
    assert server.version == 3


@pytest.mark.anyio
async def test_the_others_go_on_when_one_that_was_cancelled_has_left() -> None:
    server = make_server(Synchronous(), 2)
    async with anyio.create_task_group() as group:
        group.start_soon(train, server, 0, checkpoint, 3)
        with anyio.move_on_after(0.02):
            await train(server, 1, anyio.sleep_forever, 3)
        assert server.version == 0
        server.leave(1)
    assert server.version == 3


@pytest.mark.anyio
async def test_a_lost_session_goes_on_with_the_servers_parameters() -> None:
    server = make_server(Asynchronous(), 1, learning_rate=0.25)
    num_runs = 0

    async def lose_once() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 3:
            raise PreemptionError("lost")

    await train(server, 0, lose_once, 4)
    assert (server.version, num_runs) == (4, 5)
    np.testing.assert_array_equal(server.parameters, np.full(2, 0.5**4))


@pytest.mark.anyio
async def test_the_others_wait_while_a_shared_session_is_recreated() -> None:
    server = make_server(Synchronous(), 2)
    num_runs = 0

    async def step(worker: int) -> dict[str, Any]:
        nonlocal num_runs
        num_runs += 1
        version = server.pull(worker).version
        await checkpoint()
        if worker == 1 and num_runs in (2, 7):
            raise PreemptionError("lost")
        server.push(worker, np.ones(2), version)
        return {"loss": 0.5}

    creator = SharedSessionCreator(FunctionSessionCreator(step, global_step=server.global_step))
    async with anyio.create_task_group() as group:
        group.start_soon(train_shared, server, 0, creator, 6)
        await settle()
        group.start_soon(train_shared, server, 1, creator, 6)
    assert (server.version, server.num_applied, server.num_discarded) == (6, 12, 0)
    assert num_runs > 12


@pytest.mark.anyio
async def test_a_worker_that_waits_at_the_limit_leaves_its_block_cleanly() -> None:
    server = make_server(StaleSynchronous(0), 2)
    num_runs = []

    async def first() -> None:
        num_runs.append(await train(server, 0, checkpoint, 2))

    async with anyio.create_task_group() as group:
        group.start_soon(first)
        await settle()  # it has made a step, and waits in before_run of its second
        server.push(1, np.ones(2), 1)
    assert num_runs == [1]  # the block was left by StopTraining, which it swallows
    assert server.num_present == 1


@pytest.mark.anyio
async def test_after_its_session_was_stopped_a_worker_may_go_on_without_one() -> None:
    server = make_server(StaleSynchronous(0), 2)
    async with session_of(server, 0) as session:
        await session.run("loss")
        session.request_stop()
    server.join(0)
    async with anyio.create_task_group() as group:
        group.start_soon(server.begin_step, 0)
        await settle()
        assert server.clock(0) == 1
        server.push(1, np.ones(2), server.version)
