"""Processes that die or fall silent, at both ends of a parameter server on Dask."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import StepSourceLostError, StepUnreachableError, StopTraining
from asynchooks.distributed import (
    RemoteParameterServer,
    ServerAddress,
    SourceState,
    host_parameter_server,
)
from asynchooks.protocols import Synchronous

from .clusters import addresses, comes, native, other_process, until

pytestmark = pytest.mark.faults


async def line_of(process: Any) -> str:
    with anyio.fail_after(20):
        line: str = await anyio.to_thread.run_sync(process.stdout.readline)
    return line.strip()


def send_line(process: Any) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


async def push_and_end(server: RemoteParameterServer, worker: int) -> int:
    """One synchronous step; the version after it."""
    await server.begin_step(worker)
    version = (await server.pull(worker)).version
    await server.push(worker, np.ones(2), version)
    await server.end_step(worker)
    return (await server.pull(worker)).version


@pytest.mark.anyio
async def test_others_do_not_wait_for_a_process_that_was_killed(client: Any) -> None:
    async with native(client) as own:
        async with host_parameter_server(
            own, np.ones(2), Synchronous(), num_workers=2, lease_secs=1.0
        ) as server:
            with other_process(client.scheduler.address, server.address, "wait_one_step") as other:
                assert await line_of(other) == "pushed"
                await until(server, waits=1, blocked_requests=2, processes=2)
                other.kill()
                with anyio.fail_after(
                    10
                ):  # its gradient counts, but others do not wait for the next
                    assert await push_and_end(server, 0) == 1
                    assert await push_and_end(server, 0) == 2
            await until(server, workers_present=1, blocked_requests=1)


async def hold_a_step(address: ServerAddress) -> None:
    """As worker 1, on a Dask worker, until that dies."""
    async with RemoteParameterServer(address) as server:
        await push_and_end(server, 1)
        await server.begin_step(1)
        await anyio.sleep_forever()


@pytest.mark.anyio
async def test_others_do_not_wait_for_a_dask_worker_that_has_left_its_cluster(client: Any) -> None:
    async with native(client) as own:
        here, there = addresses(client)[:2]
        async with host_parameter_server(
            own, np.ones(2), Synchronous(), num_workers=2, worker=here, lease_secs=8.0
        ) as server:
            pid = client.run(os.getpid, workers=[there])[there]
            holding = client.submit(hold_a_step, server.address, workers=[there], pure=False)
            assert await push_and_end(server, 0) == 1
            await until(server, processes=2, waits=0)
            os.kill(pid, signal.SIGKILL)
            await until(server, workers_present=1)
            assert await push_and_end(server, 0) == 2
            holding.cancel()
    await comes(lambda: len(addresses(client)) == 3)  # for the tests after this


@pytest.mark.anyio
async def test_a_process_that_was_silent_for_long_is_back_at_its_next_request(
    client: Any,
) -> None:
    async with native(client) as own:
        async with host_parameter_server(
            own, np.ones(2), Synchronous(), num_workers=2, lease_secs=0.6
        ) as server:
            with other_process(client.scheduler.address, server.address, "wait_one_step") as other:
                assert await line_of(other) == "pushed"
                other.send_signal(signal.SIGSTOP)
                await until(server, processes_away=1, workers_present=1, blocked_requests=1)
                assert await push_and_end(server, 0) == 1
                other.send_signal(signal.SIGCONT)
                assert await line_of(other) == "went on at 1"


@pytest.mark.anyio
async def test_a_process_that_fails_may_be_restarted_within_the_lease(client: Any) -> None:
    scheduler = client.scheduler.address
    async with native(client) as own:
        async with host_parameter_server(
            own, np.ones(2), Synchronous(), num_workers=2, lease_secs=60.0
        ) as server:
            address = server.address
            with (
                other_process(scheduler, address, "crash_in_a_step") as one,
                other_process(scheduler, address, "wait_one_step_on_request") as again,
            ):
                assert await line_of(one) == "begun"
                assert await line_of(again) == "here"
                send_line(one)
                await until(server, processes=3, blocked_requests=2, workers_present=2)
                send_line(again)
                assert await line_of(again) == "pushed"
                assert await push_and_end(server, 0) == 1
                assert await line_of(again) == "went on at 1"
                again.wait()


@pytest.mark.anyio
async def test_with_an_infinite_lease_the_others_wait(client: Any) -> None:
    async with native(client) as own:
        async with host_parameter_server(
            own, np.ones(2), Synchronous(), num_workers=2, lease_secs=math.inf
        ) as server:
            with other_process(client.scheduler.address, server.address, "crash_in_a_step") as one:
                assert await line_of(one) == "begun"
            with anyio.move_on_after(1.0) as scope:
                await push_and_end(server, 0)
            assert scope.cancelled_caught
            await server.leave(1)
            assert await push_and_end(server, 0) == 2


@pytest.mark.anyio
async def test_a_server_that_is_stopped_is_waited_for(client: Any) -> None:
    async with native(client) as own:
        place = addresses(client)[0]
        pid = client.run(os.getpid, workers=[place])[place]
        async with host_parameter_server(
            own, np.ones(2), Synchronous(), num_workers=2, worker=place, lease_secs=0.4
        ) as server:
            os.kill(pid, signal.SIGSTOP)
            try:
                with anyio.fail_after(10):
                    await comes(lambda: server.global_step.statistics().source is SourceState.LOST)
                    with pytest.raises(StepSourceLostError, match="no news of other processes"):
                        await server.global_step.wait_for(1, fails_on_loss=True)
                await anyio.sleep(0.5)  # silence for longer than a lease ends nothing
                async with anyio.create_task_group() as group:
                    group.start_soon(server.global_step.wait_for, 1)
                    os.kill(pid, signal.SIGCONT)
                    with anyio.fail_after(10):
                        await server.join(1)
                        await server.push(1, np.ones(2), 0)
                        await server.join(0)
                        await server.push(0, np.ones(2), 0)
                await comes(lambda: server.global_step.statistics().source is SourceState.LIVE)
            finally:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.anyio
async def test_all_waits_end_when_the_server_has_died(client: Any) -> None:
    await comes(lambda: len(addresses(client)) == 3)  # a nanny starts another one
    async with native(client) as own:
        place = addresses(client)[0]
        pid = client.run(os.getpid, workers=[place])[place]
        async with host_parameter_server(
            own, np.ones(2), Synchronous(), num_workers=2, worker=place, lease_secs=1.0
        ) as server:
            ended: list[str] = []

            async def end() -> None:
                with pytest.raises(StepSourceLostError, match="parameter server at tcp://"):
                    await push_and_end(server, 0)
                ended.append("end")

            async def step() -> None:
                with pytest.raises(StepUnreachableError):
                    await server.global_step.wait_for(5)
                ended.append("step")

            with anyio.fail_after(15):
                async with anyio.create_task_group() as group:
                    group.start_soon(end)
                    group.start_soon(step)
                    await until(server, waits=1)
                    os.kill(pid, signal.SIGKILL)
            assert sorted(ended) == ["end", "step"]
            with pytest.raises((StepSourceLostError, StopTraining)):
                await server.begin_step(1)
