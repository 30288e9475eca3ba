"""What becomes of a training when its scheduler, a process or a connection is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from distributed import Client

from asynchooks import (
    CheckpointSaverHook,
    MonitoredSession,
    StateDictSaver,
    StepSourceLostError,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.distributed import DaskCluster, SourceState

from .processes import Scheduler, a_scheduler
from .test_dask import step, wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def own_scheduler() -> Iterator[Scheduler]:
    """One that tests may stop, and kill if they start it again."""
    with a_scheduler() as running:
        yield running


async def until_state(cluster: DaskCluster, state: SourceState) -> None:
    with anyio.fail_after(20):
        while cluster.global_step.statistics().source is not state:  # noqa: ASYNC110
            await anyio.sleep(0.005)


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


async def train(cluster: DaskCluster, last_step: int) -> int:
    num_runs = 0
    hooks = [StopAtStepHook(last_step=last_step)]
    async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
        while not session.should_stop():
            await session.run("loss")
            num_runs += 1
    return num_runs


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
                found.append(await train(cluster, 10))

            group.start_soon(one)
            await wait_until(cluster, "step", 9)  # the last one belongs to the other
            await wait_until(cluster, "num_wanting", 1)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with anyio.fail_after(2):
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
        assert await train(cluster, 10) == 10
    process.kill()
    process.join()


async def test_a_silent_scheduler_is_lost_within_the_heartbeat_and_waits_go_on_after_it(
    own_scheduler: Scheduler, training: str
) -> None:
    reached: list[Any] = []
    async with DaskCluster(own_scheduler.address, training, heartbeat_secs=0.6) as cluster:
        async with anyio.create_task_group() as group:

            async def wait(fails_on_loss: bool) -> None:
                try:
                    step = cluster.global_step
                    reached.append(await step.wait_for(1, fails_on_loss=fails_on_loss))
                except StepSourceLostError as error:
                    reached.append(type(error))

            for fails_on_loss in (False, True):
                group.start_soon(wait, fails_on_loss)
            await wait_until(cluster, "num_waiting", 1)
            own_scheduler.send(signal.SIGSTOP)
            with anyio.fail_after(3):
                await until_state(cluster, SourceState.LOST)
            group.start_soon(cluster.publish, 1)
            own_scheduler.send(signal.SIGCONT)
            await until_state(cluster, SourceState.LIVE)
    assert reached == [StepSourceLostError, 1]
    assert cluster.global_step.epoch == 0


async def test_training_goes_on_exactly_after_the_scheduler_was_stopped_for_a_while(
    own_scheduler: Scheduler, training: str
) -> None:
    async def slow() -> dict[str, float]:
        await anyio.sleep(0.01)
        return {"loss": 0.0}

    num_runs = 0
    async with DaskCluster(own_scheduler.address, training, heartbeat_secs=0.3) as cluster:

        async def one() -> None:
            nonlocal num_runs
            hooks = [StopAtStepHook(last_step=80)]
            async with MonitoredSession(hooks, cluster.session_creator(slow)) as session:
                while not session.should_stop():
                    await session.run("loss")
                    num_runs += 1

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(one)
            await cluster.global_step.wait_for(20)
            own_scheduler.send(signal.SIGSTOP)
            await until_state(cluster, SourceState.LOST)
            own_scheduler.send(signal.SIGCONT)
        assert (num_runs, cluster.global_step.value) == (80, 80)
        assert (await cluster.statistics())["num_held"] == 0


def cut(cluster: DaskCluster) -> None:
    """As a network does: both ends see the connection end."""
    stream = cluster._stream
    assert stream is not None
    assert stream.comm is not None
    cluster._loop._loop.call_soon_threadsafe(stream.comm.abort)


async def test_a_scheduler_that_is_killed_and_started_again_gets_the_step_of_the_checkpoint(
    own_scheduler: Scheduler, training: str, tmp_path: Path
) -> None:
    saver = StateDictSaver(weights={"w": np.zeros(3)})
    async with DaskCluster(own_scheduler.address, training, heartbeat_secs=0.6) as cluster:
        hooks = [
            StopAtStepHook(last_step=12),
            CheckpointSaverHook(tmp_path, save_steps=1, saver=saver),
        ]
        async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
            for _ in range(5):
                await session.run("loss")
            own_scheduler.kill()
            await until_state(cluster, SourceState.LOST)
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.to_thread.run_sync, own_scheduler.start)
                with anyio.fail_after(20):
                    await session.run("loss")  # waits for the scheduler, and is run anew
            assert session.global_step.value == 6
            while not session.should_stop():
                await session.run("loss")
        assert cluster.global_step.value == 12
        async with DaskCluster(own_scheduler.address, training) as other:
            assert other.global_step.value == 12


async def test_a_cut_connection_comes_back_and_no_step_is_lost_or_counted_twice(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training) as cluster:
        async with anyio.create_task_group() as group:
            found: list[int] = []

            async def count() -> None:
                for _ in range(300):
                    found.append(await cluster.advance())

            group.start_soon(count)
            for reached in (50, 100, 150):
                await cluster.global_step.wait_for(reached)
                cut(cluster)
        assert found == list(range(1, 301))
        assert (await cluster.statistics())["num_processes"] == 1


@pytest.mark.parametrize("num_cuts", [1, 5])
async def test_the_stop_is_exact_although_connections_are_cut(
    scheduler: Scheduler, training: str, num_cuts: int
) -> None:
    async with DaskCluster(scheduler.address, training) as here:
        async with DaskCluster(scheduler.address, training) as there:
            async with anyio.create_task_group() as group:
                for cluster in (here, there):
                    for _ in range(3):
                        group.start_soon(train, cluster, 300)
                for place in range(num_cuts):
                    await here.global_step.wait_for(50 + 40 * place)
                    cut(here)
            assert here.global_step.value == there.global_step.value == 300
            assert (await here.statistics())["step"] == 300


async def test_waits_end_when_the_client_is_closed(scheduler: Scheduler, training: str) -> None:
    client = Client(scheduler.address, set_as_default=False)
    cluster = DaskCluster(client, training, heartbeat_secs=0.3)
    async with cluster, anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(StepUnreachableError, match="can no longer come"):
                await cluster.global_step.wait_for(10)

        group.start_soon(wait)
        await wait_until(cluster, "num_waiting", 1)
        # as somebody else in the process may do it
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


async def test_a_process_that_leaves_without_a_word_leaves_no_wait_behind(
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
