"""What one process does at a training: step, waits, restarts, and its end."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
import pytest
from distributed import Client

from asynchooks import (
    StepUnreachableError,
)
from asynchooks.distributed import DaskCluster, SourceState

from .processes import Scheduler
from .sessions import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


async def test_two_trainings_by_different_names_do_not_meet(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training) as one:
        async with DaskCluster(scheduler.address, training + " too") as other:
            assert await one.advance(3) == 3
            assert await other.advance() == 1


async def test_a_waiter_goes_on_when_another_process_publishes(
    scheduler: Scheduler, training: str
) -> None:
    reached = []
    async with DaskCluster(scheduler.address, training) as waiting:
        async with DaskCluster(scheduler.address, training) as moving:
            async with anyio.create_task_group() as group:

                async def wait() -> None:
                    reached.append(await waiting.global_step.wait_for(5))

                group.start_soon(wait)
                await wait_until(moving, "num_waiting", 1)
                moving.publish_soon(4)
                assert await moving.publish(5) == 5
    assert reached == [5]


async def test_a_later_cluster_continues_a_training_until_it_is_forgotten(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training) as cluster:
        await cluster.advance(4)
    async with DaskCluster(scheduler.address, training) as cluster:
        assert cluster.global_step.value == 4
        await cluster.forget()
    async with DaskCluster(scheduler.address, training) as cluster:
        assert cluster.global_step.value == 0


async def test_a_restart_takes_the_step_back_everywhere(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training) as here:
        async with DaskCluster(scheduler.address, training) as there:
            await here.advance(9)
            await there.restart(3)
            assert await here.advance(0) == 3
            assert here.global_step.value == 3
            assert here.global_step.epoch == there.global_step.epoch == 1


async def test_while_a_process_waits_nothing_but_heartbeats_leaves_it(
    scheduler: Scheduler, training: str
) -> None:
    never: dict[str, Any] = {"heartbeat_secs": 1e4, "lease_secs": 1e4}
    async with DaskCluster(scheduler.address, training, **never) as cluster:
        async with anyio.create_task_group() as group:
            for each in range(50):
                group.start_soon(cluster.global_step.wait_for, 100 + each)
            await wait_until(cluster, "num_waiting", 1)
            before = cluster.source.num_requests
            await anyio.sleep(0.3)
            assert cluster.source.num_requests == before
            await cluster.publish(200)


async def test_a_cancelled_waiter_leaves_nothing_behind(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training) as cluster:
        with anyio.move_on_after(0.05):
            await cluster.global_step.wait_for(10)
        assert cluster.global_step.statistics().tasks_waiting_for_step == 0
    async with DaskCluster(scheduler.address, training) as cluster:
        found = await cluster.statistics()
        assert (found["num_processes"], found["num_waiting"]) == (1, 0)


async def test_waits_end_when_the_cluster_is_closed(scheduler: Scheduler, training: str) -> None:
    cluster = await DaskCluster(scheduler.address, training).open()
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(StepUnreachableError, match="can no longer come"):
                await cluster.global_step.wait_for(10)

        group.start_soon(wait)
        await wait_until(cluster, "num_waiting", 1)
        await cluster.aclose()
    await cluster.aclose()
    assert cluster.global_step.statistics().source is SourceState.CLOSED
    with pytest.raises(StepUnreachableError, match="gets no more news"):
        await cluster.advance()


@pytest.mark.parametrize("is_registered_again", [False, True])
async def test_a_synchronous_client_serves_both_event_loops(
    scheduler: Scheduler, training: str, is_registered_again: bool
) -> None:
    with Client(scheduler.address, set_as_default=False) as client:
        async with DaskCluster(client, training) as cluster:
            assert await cluster.advance(2) == 2
            if is_registered_again:
                async with DaskCluster(client, training) as again:
                    assert again.global_step.value == 2
