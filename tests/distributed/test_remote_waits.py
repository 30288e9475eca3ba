"""Waits at a parameter server in another process: how they end, and what they cost."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    StepUnreachableError,
    StopTraining,
)
from asynchooks.distributed import RemoteParameterServer, host_parameter_server
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KSync,
    ProtocolHook,
    Synchronous,
)

from .clusters import is_stopped, native, until

pytestmark = pytest.mark.faults


@pytest.mark.anyio
async def test_no_warning_when_all_workers_here_wait_for_other_processes(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def step() -> dict[str, Any]:
        return {"none": 0}

    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=1) as server,
            RemoteParameterServer(server.address, own) as other,
        ):
            creator = FunctionSessionCreator(step, global_step=server.global_step)
            async with (
                MonitoredSession([GlobalStepWaiterHook(1)], creator) as session,
                anyio.create_task_group() as group,
            ):
                group.start_soon(session.run, "none")
                await until(server, blocked_requests=2)
                await other.push(0, np.ones(2), 0)
    assert not [each for each in caplog.messages if "open workers wait" in each]


@pytest.mark.anyio
async def test_many_waits_are_one_blocked_request_and_none_leaves_meanwhile(client: Any) -> None:
    num_workers = 40
    async with native(client) as own:
        async with (
            host_parameter_server(
                own, np.ones(2), Synchronous(), num_workers=num_workers
            ) as server,
            anyio.create_task_group() as group,
        ):

            async def work(worker: int) -> None:
                await server.begin_step(worker)
                parameters, version = await server.pull(worker)
                await server.push(worker, parameters, version)
                await server.end_step(worker)

            for worker in range(num_workers - 1):
                group.start_soon(work, worker)
            before = await until(server, waits=num_workers - 1)
            await anyio.sleep(0.3)
            after = await server.statistics()
            assert after.blocked_requests == 1
            assert after.requests == before.requests + 1
            await work(num_workers - 1)
        assert server.version == 1


@pytest.mark.anyio
async def test_a_cancelled_wait_leaves_at_once_and_leaves_nothing_behind(client: Any) -> None:
    async with native(client) as own:
        async with host_parameter_server(own, np.ones(2), Synchronous(), num_workers=2) as server:
            await server.begin_step(0)
            await server.push(0, np.ones(2), 0)
            for verb in (server.end_step, server.begin_step, server.end_step):
                async with anyio.create_task_group() as group:
                    group.start_soon(verb, 0)
                    await until(server, waits=1)
                    group.cancel_scope.cancel()
                await until(server, waits=0)
            with anyio.move_on_after(0):  # in the request itself
                await server.begin_step(0)
            before = await until(server, waits=0, collected=1)
            await anyio.sleep(0.1)
            assert (await server.statistics()).requests <= before.requests + 5  # it is not repeated
            async with anyio.create_task_group() as group:
                group.start_soon(server.begin_step, 0)
                await server.push(1, np.ones(2), 0)
            assert (await server.pull(0)).version == 1


@pytest.mark.anyio
async def test_closing_ends_the_waits_of_all_processes(client: Any) -> None:
    ended: list[str] = []
    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), Synchronous(), num_workers=3) as server,
            RemoteParameterServer(server.address, own) as other,
        ):

            async def begin() -> None:
                assert await is_stopped(other.begin_step(1))
                ended.append("begin")

            async def end() -> None:
                await other.end_step(0)
                ended.append("end")

            async def step() -> None:
                with pytest.raises(StepUnreachableError, match="global_step 7 can no longer come"):
                    await other.global_step.wait_for(7)
                ended.append("step")

            await other.push(0, np.ones(2), 0)
            await other.push(1, np.ones(2), 0)
            async with anyio.create_task_group() as group:
                for each in (begin, end, step):
                    group.start_soon(each)
                await until(server, waits=2)
                await server.close()
            assert sorted(ended) == ["begin", "end", "step"]
            assert other.is_over
            with pytest.raises(StopTraining, match="the parameter server is closed"):
                await other.begin_step(0)
            assert (await other.push(2, np.ones(2), 0)).is_discarded


@pytest.mark.anyio
async def test_a_wait_ends_with_its_session(client: Any) -> None:
    async with native(client) as own:
        async with host_parameter_server(own, np.ones(2), Synchronous(), num_workers=2) as server:

            async def step() -> dict[str, Any]:
                parameters, version = await server.pull(0)
                await server.push(0, parameters, version)
                return {"version": version}

            async def stop(session: MonitoredSession) -> None:
                await until(server, waits=1)
                session.request_stop()

            creator = FunctionSessionCreator(step, global_step=server.global_step)
            async with MonitoredSession([ProtocolHook(server, 0)], creator) as session:
                async with anyio.create_task_group() as group:
                    group.start_soon(stop, session)
                    await session.run("version")
                assert session.should_stop()
            await until(server, waits=0, workers_present=1, version=0)


@pytest.mark.anyio
async def test_a_limit_ends_the_waits_that_are_under_way(client: Any) -> None:
    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), KAsync(2), num_workers=3) as server,
            anyio.create_task_group() as group,
        ):
            await server.push(0, np.ones(2), 0)
            await server.push(1, np.ones(2), 0)
            await server.push(0, np.ones(2), 1)
            group.start_soon(is_stopped, server.begin_step(0))
            await until(server, waits=1)
            server.global_step.raise_limit(1)
            assert await is_stopped(server.begin_step(2))
        assert server.version == 1


@pytest.mark.anyio
async def test_a_computation_is_abandoned_when_another_process_makes_the_update(
    client: Any,
) -> None:
    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), KSync(1), num_workers=2) as server,
            RemoteParameterServer(server.address, own) as other,
        ):
            for version in range(3):
                began = anyio.Event()
                outcomes: list[Any] = []

                async def compute(began: anyio.Event = began) -> str:
                    began.set()
                    await anyio.sleep_forever()
                    return ""

                async def work(version: int = version, outcomes: list[Any] = outcomes) -> None:
                    outcomes.append(await server.compute(version, compute))

                with anyio.fail_after(5):  # not by a heartbeat
                    async with anyio.create_task_group() as group:
                        group.start_soon(work)
                        await began.wait()
                        await other.push(1, np.ones(2), version)
                assert outcomes == [(False, None)]
            assert await server.compute(3, anyio.sleep, 0) == (True, None)
            assert await server.compute(2, anyio.sleep, 0) == (False, None)
