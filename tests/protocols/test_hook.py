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
    ParameterServer,
    Protocol,
    ProtocolHook,
    StaleSynchronous,
    Synchronous,
)

from ..support.helpers import in_task, settle
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


async def train(server: ParameterServer, worker: int, wait: Wait, last_step: int) -> None:
    await run_all(session_of(server, worker, StopAtStepHook(last_step=last_step), wait=wait))


async def train_shared(server: ParameterServer, worker: int, creator: Any, last_step: int) -> None:
    hooks = [ProtocolHook(server, worker), StopAtStepHook(last_step=last_step)]
    recovery = Recovery(first_pause_secs=0)
    await run_all(MonitoredSession(hooks, creator, recovery=recovery), {"worker": worker})


@pytest.mark.parametrize("backend", ["trampoline", "asyncio", "trio"])
@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_sessions_train_to_the_limit_and_leave_and_may_train_again(
    protocol: Protocol, backend: str
) -> None:
    server = make_server(protocol, 4)

    async def main() -> None:
        engine = current_engine()
        for limit in (7, 9):
            tasks = [
                engine.start(train, server, index, partial(pause, 0.001 * (1 + index % 3)), limit)
                for index in range(4)
            ]
            for task in tasks:
                await task.wait()
            assert server.version == server.global_step.value == limit
            assert server.num_present == 0

    if backend == "trampoline":
        Trampoline().run(main)
    else:
        anyio.run(main, backend=backend)
    assert server.version == 9


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
async def test_a_session_on_another_step_is_refused() -> None:
    server = make_server(Asynchronous(), 1)
    creator = creator_of(make_server(Asynchronous(), 1), 0, checkpoint)
    with pytest.raises(RuntimeError, match=r"give both the same step: FunctionSessionCreator"):
        async with MonitoredSession([ProtocolHook(server, 0)], creator) as session:
            await session.run("loss")


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", [Synchronous(), StaleSynchronous(0)], ids=repr)
async def test_a_worker_that_waits_ends_when_its_session_is_stopped(protocol: Protocol) -> None:
    server = make_server(protocol, 2)
    session = session_of(server, 0)
    async with in_task(run_all, session) as ended:  # worker 1 never comes
        session.request_stop()
    assert ended.value == 1
    assert server.num_present == 1


@pytest.mark.anyio
async def test_a_worker_that_waits_at_the_limit_leaves_its_block_cleanly() -> None:
    server = make_server(StaleSynchronous(0), 2)
    session = session_of(server, 0, StopAtStepHook(last_step=2))
    async with in_task(run_all, session) as ended:  # it waits in before_run of its second step
        server.push(1, np.ones(2), 1)
    assert ended.value == 1  # the block was left by StopTraining, which it swallows
    assert server.num_present == 1


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
