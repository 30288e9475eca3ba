"""What becomes of a training when its scheduler, or a connection to it, is lost."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
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
from asynchooks.distributed import DaskCluster, SourceState, _stream, host_parameter_server
from asynchooks.protocols import Synchronous

from ..support.helpers import in_task
from ..support.threads import threads_left
from .clusters import native
from .processes import Scheduler, a_scheduler, a_worker
from .proxy import a_proxy
from .sessions import Join, cut, slow_step, step, train_here, until_state, wait_until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.faults,
    # Dask's own connect forgets its socket when it is cancelled while it shakes hands
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket"),
]


ONE_BACKEND = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For tests that start a scheduler, which takes a second or more."""


@pytest.fixture(scope="module")
def own_scheduler() -> Iterator[Scheduler]:
    """One that tests may stop, and kill if they start it again."""
    with a_scheduler() as running:
        yield running


async def test_a_silent_scheduler_is_lost_within_the_heartbeat_and_waits_go_on_after_it(
    own_scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(own_scheduler.address, training, heartbeat_secs=0.6) as cluster:
        fails = partial(cluster.global_step.wait_for, 1, fails_on_loss=True)
        async with in_task(fails) as failed, in_task(cluster.global_step.wait_for, 1) as waited:
            await wait_until(cluster, "num_waiting", 1)
            own_scheduler.send(signal.SIGSTOP)
            await until_state(cluster, SourceState.LOST)
            async with in_task(cluster.advance):
                own_scheduler.send(signal.SIGCONT)
            await until_state(cluster, SourceState.LIVE)
        assert isinstance(failed.error, StepSourceLostError)
        assert waited.value == 1
        assert cluster.global_step.epoch == 0


@pytest.mark.parametrize("secs", [1.0, pytest.param(20.0, marks=pytest.mark.slow)])
async def test_training_continues_exactly_after_the_scheduler_was_stopped_for_a_while(
    own_scheduler: Scheduler, training: str, secs: float
) -> None:
    async with DaskCluster(own_scheduler.address, training, heartbeat_secs=0.3) as cluster:
        async with (
            in_task(train_here, cluster, 80, slow_step) as one,
            in_task(train_here, cluster, 80, slow_step) as other,
        ):
            await cluster.global_step.wait_for(20)
            own_scheduler.send(signal.SIGSTOP)
            await until_state(cluster, SourceState.LOST)
            await anyio.sleep(secs)
            own_scheduler.send(signal.SIGCONT)
        assert one.value + other.value == cluster.global_step.value == 80
        assert (await cluster.statistics())["num_held"] == 0


LONG = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("num_times", [1, pytest.param(8, marks=LONG)])
async def test_a_scheduler_that_is_killed_and_started_again_gets_the_step_of_the_checkpoint(
    own_scheduler: Scheduler, training: str, tmp_path: Path, num_times: int
) -> None:
    saver = StateDictSaver(weights={"w": np.zeros(3)})
    async with DaskCluster(own_scheduler.address, training, heartbeat_secs=0.6) as cluster:
        hooks = [
            StopAtStepHook(last_step=20),
            CheckpointSaverHook(tmp_path, save_steps=1, saver=saver),
        ]
        async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
            for step_before in range(1, 1 + num_times):
                await session.run("loss")
                own_scheduler.kill()
                await until_state(cluster, SourceState.LOST)
                async with in_task(anyio.to_thread.run_sync, own_scheduler.start):
                    await session.run("loss")  # waits for the scheduler, and runs again
                assert session.global_step.value == 2 * step_before
            while not session.should_stop():
                await session.run("loss")
        assert cluster.global_step.value == 20
        async with DaskCluster(own_scheduler.address, training) as other:
            assert other.global_step.value == 20


async def test_a_process_that_joins_while_the_scheduler_is_started_again_waits_for_it(
    own_scheduler: Scheduler, training: str
) -> None:
    own_scheduler.kill()
    cluster = DaskCluster(own_scheduler.address, training, timeout_secs=30)
    async with in_task(cluster.open):
        await anyio.to_thread.run_sync(own_scheduler.start)
    async with aclosing(cluster):
        assert await cluster.advance() == 1


@pytest.mark.parametrize("is_synchronous", [False, True])
@ONE_BACKEND
async def test_a_client_that_finds_its_scheduler_again_takes_the_training_along(
    own_scheduler: Scheduler, training: str, is_synchronous: bool
) -> None:
    with Client(own_scheduler.address, set_as_default=False) as client:
        async with native(client) as own:
            used = client if is_synchronous else own
            async with DaskCluster(used, training, heartbeat_secs=0.6) as cluster:
                assert await cluster.advance(7) == 7
                own_scheduler.kill()
                await until_state(cluster, SourceState.LOST)
                await anyio.to_thread.run_sync(own_scheduler.start)
                await until_state(cluster, SourceState.LIVE)
                assert await cluster.advance() == 1
                assert cluster.global_step.epoch == 1


async def test_a_cut_connection_comes_back_and_no_step_is_lost_or_counted_twice(join: Join) -> None:
    async with join() as cluster:
        found: list[int] = []

        async def count() -> None:
            for _ in range(150):
                found.append(await cluster.advance())

        async with in_task(count):
            for reached in (30, 60, 90):
                await cluster.global_step.wait_for(reached)
                cut(cluster)
        assert found == list(range(1, 151))
        assert (await cluster.statistics())["num_processes"] == 1


async def test_it_is_soon_checked_whether_a_scheduler_that_is_away_will_be_back(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, connect = [], _stream.connect

    async def refused(address: str, timeout: float, **options: Any) -> Any:
        tried.append(timeout)
        if len(tried) < 4:
            raise ConnectionRefusedError
        return await connect(address, timeout, **options)

    async with join() as cluster:
        await cluster.advance()
        monkeypatch.setattr(_stream, "connect", refused)
        cut(cluster)
        assert await cluster.advance() == 2
    assert tried == [0.5, 1.0, 2.0, 3.0]


async def test_the_stop_is_exact_although_connections_are_cut(join: Join) -> None:
    async with join() as here, join() as there:
        async with anyio.create_task_group() as group:
            for cluster in (here, there, here, there):
                group.start_soon(train_here, cluster, 200)
            for reached in (30, 60, 90, 120):
                await here.global_step.wait_for(reached)
                cut(here)
        assert here.global_step.value == there.global_step.value == 200
        assert (await here.statistics())["step"] == 200


async def test_a_silent_network_is_noticed_and_the_stop_is_exact_when_it_is_back(
    scheduler: Scheduler, training: str
) -> None:
    async with a_proxy(scheduler) as proxy, DaskCluster(scheduler.address, training) as near:
        async with DaskCluster(proxy.address, training, heartbeat_secs=0.3) as far:
            async with (
                in_task(train_here, near, 120) as one,
                in_task(train_here, far, 120) as other,
            ):
                await far.global_step.wait_for(30)
                proxy.fall_silent()
                await until_state(far, SourceState.LOST)
                proxy.heal()
            assert near.global_step.value == far.global_step.value == 120
            assert one.value + other.value == 120
            await until_state(far, SourceState.LIVE)
        await wait_until(near, "num_processes", 1)


async def test_a_network_that_was_cut_is_found_again_and_the_others_go_on_meanwhile(
    scheduler: Scheduler, training: str
) -> None:
    async with a_proxy(scheduler) as proxy, DaskCluster(scheduler.address, training) as near:
        async with DaskCluster(proxy.address, training, heartbeat_secs=0.3) as far:
            async with in_task(far.global_step.wait_for, 100):
                await wait_until(near, "num_waiting", 1)
                proxy.close()
                await until_state(far, SourceState.LOST)
                await wait_until(near, "num_processes", 1)
                assert await train_here(near, 100) == 100
                assert far.global_step.value == 0
                proxy.heal()
            assert far.global_step.value == 100
            assert far.global_step.epoch == 0


async def test_opening_that_is_cancelled_leaves_no_thread_task_or_process_behind(
    own_scheduler: Scheduler, training: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_scheduler.send(signal.SIGSTOP)
    try:
        with anyio.move_on_after(0.2) as scope:
            await DaskCluster(own_scheduler.address, training).open()
    finally:
        own_scheduler.send(signal.SIGCONT)
    assert scope.cancelled_caught
    assert threads_left("asynchooks-dask") == []
    gc.collect()
    assert not [each for each in caplog.messages if "it is pending" in each]
    async with DaskCluster(own_scheduler.address, training) as cluster:
        await wait_until(cluster, "num_processes", 1)


@ONE_BACKEND
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
async def test_waits_end_when_a_parameter_server_and_its_scheduler_are_lost_together(
    is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it waits for half a minute otherwise
    monkeypatch.setattr("asynchooks.distributed._remote._GIVE_UP_SECS", 1.0)
    with a_scheduler() as scheduler, a_worker(scheduler) as worker:
        async with Client(
            scheduler.address, asynchronous=True, set_as_default=False, timeout=3
        ) as client:
            await client.wait_for_workers(1)
            async with host_parameter_server(
                client, np.ones(2), Synchronous(), num_workers=2, lease_secs=2.0
            ) as server:
                await server.begin_step(0)
                await server.push(0, np.ones(2), 0)
                wait = server.global_step.wait_for
                async with (
                    in_task(wait, 5) as waited,
                    in_task(partial(wait, 5, fails_on_loss=True)) as failed,
                    in_task(server.end_step, 0) as ended,
                ):
                    worker.kill()
                    if is_killed:
                        scheduler.kill()
                    else:
                        scheduler.send(signal.SIGSTOP)
            scheduler.send(signal.SIGCONT)
    for error, kind, words in (
        (ended.error, StepSourceLostError, "parameter server at .* is lost"),
        (waited.error, StepUnreachableError, "can no longer come"),
        (failed.error, StepSourceLostError, "no news"),
    ):
        assert isinstance(error, kind)
        assert re.search(words, str(error))
