"""ProtocolHook: sessions that wait by a protocol; what they leave at their end."""

from collections.abc import Awaitable, Callable
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
from asynchooks.protocols import (
    Asynchronous,
    ParameterServer,
    Protocol,
    ProtocolHook,
    StaleSynchronous,
    Synchronous,
)

from ..support.helpers import in_task, settle
from .worlds import ALL, make_server

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
    server: ParameterServer, worker: int, *hooks: Any, wait: Wait = checkpoint, creator: Any = None
) -> MonitoredSession:
    """A session of one worker, which is lost without a pause."""
    return MonitoredSession(
        [ProtocolHook(server, worker), *hooks],
        creator or creator_of(server, worker, wait),
        recovery=Recovery(first_pause_secs=0),
    )


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


@pytest.mark.parametrize("protocol", ALL, ids=repr)
async def test_sessions_train_to_the_limit_and_leave_and_may_train_again(
    protocol: Protocol,
) -> None:
    server = make_server(protocol, 4)
    for limit in (7, 9):
        async with anyio.create_task_group() as group:
            for index in range(4):
                group.start_soon(train, server, index, checkpoint, limit)
        assert server.version == server.global_step.value == limit
        assert server.num_present == 0


async def test_a_synchronous_run_returns_when_its_gradient_is_applied() -> None:
    server = make_server(Synchronous())

    async def worker(index: int) -> None:
        async with session_of(server, index) as session:
            for num_runs in range(1, 4):
                await session.run("loss")
                assert not server.has_collected(index)
                assert server.version >= num_runs

    async with anyio.create_task_group() as group:
        for index in range(2):
            group.start_soon(worker, index)


async def test_a_session_on_another_step_is_refused() -> None:
    server = make_server(Asynchronous(), 1)
    creator = creator_of(make_server(Asynchronous(), 1), 0, checkpoint)
    with pytest.raises(RuntimeError, match=r"give both the same step: FunctionSessionCreator"):
        async with MonitoredSession([ProtocolHook(server, 0)], creator) as session:
            await session.run("loss")


@pytest.mark.parametrize("protocol", [Synchronous(), StaleSynchronous(0)], ids=repr)
@pytest.mark.parametrize("end", ["stop", "limit"])
async def test_a_worker_that_waits_leaves_its_block_cleanly_at_a_stop_and_at_the_limit(
    protocol: Protocol, end: str
) -> None:
    server = make_server(protocol)
    session = session_of(server, 0, StopAtStepHook(last_step=1 + (protocol == StaleSynchronous(0))))
    async with in_task(run_all, session) as ended:  # worker 1 has made no step
        if end == "stop":
            session.request_stop()
        else:
            server.push(1, np.ones(2), server.version)
    assert ended.value == 1
    assert server.num_present == 1


async def test_the_others_wait_for_a_session_that_crashed_until_it_is_back() -> None:
    server = make_server(Synchronous())
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


async def test_the_others_wait_while_a_shared_session_is_recreated() -> None:
    server = make_server(Synchronous())
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
        for worker in range(2):
            session = session_of(server, worker, StopAtStepHook(last_step=6), creator=creator)
            group.start_soon(run_all, session, {"worker": worker})
            await settle()
    assert (server.version, server.num_applied, server.num_discarded) == (6, 12, 0)
    assert num_runs > 12
