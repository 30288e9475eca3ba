"""Sessions that take part in a protocol: together, and to the limit."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
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
    Synchronous,
)

from ..support.virtual_kernel import Trampoline
from .trainers import step_of, train
from .worlds import ALL, make_server, pause


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

        tasks = [engine.start(look)]
        for index, secs in enumerate((1.0, 2.0, 5.0)):
            tasks.append(engine.start(_train, server, index, secs))
        for task in tasks:
            await task.wait()

    Trampoline().run(main)
    assert times == [5.0, 10.0, 15.0]


async def _train(server: ParameterServer, worker: int, secs: float) -> None:
    await train(server, worker, lambda: pause(secs), 3)


@pytest.mark.anyio
async def test_a_synchronous_run_returns_when_its_gradient_is_applied() -> None:
    server = make_server(Synchronous(), 2)

    async def worker(index: int) -> None:
        creator = FunctionSessionCreator(
            step_of(server, index, anyio.lowlevel.checkpoint), global_step=server.global_step
        )
        async with MonitoredSession([ProtocolHook(server, index)], creator) as session:
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
                group.start_soon(train, server, index, anyio.lowlevel.checkpoint, last_step)
        assert (server.version, server.num_applied) == (last_step, 2 * last_step)


@pytest.mark.anyio
async def test_workers_may_share_a_session_creator() -> None:
    server = make_server(KSync(2), 4)

    async def step(worker: int) -> dict[str, Any]:
        parameters, version = server.pull(worker)
        await anyio.lowlevel.checkpoint()
        server.push(worker, parameters, version)
        return {"loss": 0.5}

    creator = SharedSessionCreator(FunctionSessionCreator(step, global_step=server.global_step))

    async def worker(index: int) -> None:
        hooks = [ProtocolHook(server, index), StopAtStepHook(last_step=5)]
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run("loss", {"worker": index})

    async with anyio.create_task_group() as group:
        for index in range(4):
            group.start_soon(worker, index)
    assert server.version == 5


@pytest.mark.anyio
async def test_a_session_on_another_step_is_refused() -> None:
    server = make_server(Asynchronous(), 1)
    creator = FunctionSessionCreator(step_of(server, 0, anyio.lowlevel.checkpoint))
    with pytest.raises(RuntimeError, match=r"give both the same step: FunctionSessionCreator"):
        async with MonitoredSession([ProtocolHook(server, 0)], creator) as session:
            await session.run("loss")


def test_bad_arguments_are_refused() -> None:
    server = make_server(Asynchronous(), 2)
    with pytest.raises(TypeError, match="server is 3; give a ParameterServer"):
        ProtocolHook(3, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="worker is 2; give one from 0 to 1"):
        ProtocolHook(server, 2)
