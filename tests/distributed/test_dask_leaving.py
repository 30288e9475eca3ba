"""What becomes of a training when one of its processes, or its client, goes away."""

from __future__ import annotations

import multiprocessing
import os
import signal

import anyio
import anyio.to_thread
import pytest
from distributed import Client

from asynchooks import (
    MonitoredSession,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.distributed import DaskCluster

from .processes import Scheduler
from .sessions import train_here, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


async def _hold_a_ticket(address: str, training: str, lease_secs: float) -> None:
    async def hold() -> None:
        await anyio.sleep(1000)

    beat = lease_secs / 2
    async with DaskCluster(
        address, training, heartbeat_secs=beat, lease_secs=lease_secs
    ) as cluster:
        hooks = [StopAtStepHook(last_step=10)]
        async with MonitoredSession(hooks, cluster.session_creator(hold)) as session:
            await session.run("loss")


def hold_a_ticket(address: str, training: str, lease_secs: float = 30.0) -> None:
    anyio.run(_hold_a_ticket, address, training, lease_secs)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tickets_of_a_killed_process_are_run_by_others_at_once(
    scheduler: Scheduler, training: str
) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=hold_a_ticket, args=(scheduler.address, training))
    process.start()
    async with DaskCluster(scheduler.address, training) as cluster:
        await wait_until(cluster, "num_held", 1)
        async with anyio.create_task_group() as group:
            found = []

            async def one() -> None:
                found.append(await train_here(cluster, 10))

            group.start_soon(one)
            await wait_until(cluster, "step", 9)  # the last one belongs to the other
            await wait_until(cluster, "num_wanting", 1)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with anyio.fail_after(20):  # before its lease ends
                await cluster.global_step.wait_for(10)
    assert found == [10]
    process.join()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_process_that_is_silent_for_its_lease_loses_its_tickets(
    scheduler: Scheduler, training: str
) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=hold_a_ticket, args=(scheduler.address, training, 1.0))
    process.start()
    async with DaskCluster(scheduler.address, training) as cluster:
        await wait_until(cluster, "num_held", 1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        await wait_until(cluster, "num_processes", 1)
        assert await train_here(cluster, 10) == 10
    process.kill()
    process.join()


async def test_waits_end_when_the_client_is_closed(scheduler: Scheduler, training: str) -> None:
    client = Client(scheduler.address, set_as_default=False)
    cluster = DaskCluster(client, training, heartbeat_secs=0.3)
    async with cluster, anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(StepUnreachableError, match="can no longer come"):
                await cluster.global_step.wait_for(10)

        group.start_soon(wait)
        await wait_until(cluster, "num_waiting", 1)
        # as other code in the process may do it
        await anyio.to_thread.run_sync(client.close)
    with pytest.raises(StepUnreachableError, match="client is closed"):
        await cluster.advance()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_waits_end_when_an_asynchronous_client_is_closed(
    scheduler: Scheduler, training: str
) -> None:
    client = await Client(scheduler.address, asynchronous=True, set_as_default=False)
    async with DaskCluster(client, training, heartbeat_secs=0.3) as cluster:
        await client.close()
        with pytest.raises(StepUnreachableError, match="can no longer come"):
            await cluster.global_step.wait_for(10)
        with pytest.raises(StepUnreachableError, match="client is closed"):
            await cluster.advance()


async def test_a_process_that_leaves_without_a_message_leaves_no_wait_behind(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training) as cluster:
        for _ in range(3):
            with anyio.CancelScope() as scope:
                async with DaskCluster(scheduler.address, training) as other:
                    async with anyio.create_task_group() as group:
                        group.start_soon(other.global_step.wait_for, 100)
                        await wait_until(cluster, "num_waiting", 1)
                        scope.cancel()
        await wait_until(cluster, "num_processes", 1)
        assert (await cluster.statistics())["num_waiting"] == 0
