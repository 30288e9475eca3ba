"""What becomes of a training when its scheduler, or a connection to it, is lost."""

import gc
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from distributed import Client
from distributed.comm import connect

from asynchooks import (
    CheckpointSaverHook,
    MonitoredSession,
    StateDictSaver,
    StepSourceLostError,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.distributed import DaskCluster, SourceState, host_parameter_server
from asynchooks.protocols import Synchronous

from ..support.helpers import in_task
from ..support.proxy import Proxy
from ..support.threads import threads_left
from .clusters import native, until, until_state
from .processes import PORT, Scheduler, a_scheduler, a_worker
from .sessions import QUICK, Join, cut, slow_step, step, train_here

pytestmark = [
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


async def test_a_silent_scheduler_is_lost_and_waits_and_training_go_on_exactly_after_it(
    own_scheduler: Scheduler, training: str
) -> None:
    goes_on = anyio.Event()

    async def run() -> dict[str, float]:
        await goes_on.wait()
        return await slow_step()

    async with DaskCluster(own_scheduler.address, training, heartbeat_secs=QUICK) as cluster:
        wait = cluster.global_step.wait_for
        async with (
            in_task(partial(wait, 20, fails_on_loss=True)) as failed,
            in_task(wait, 20) as waited,
            in_task(train_here, cluster, 20, run) as one,
            in_task(train_here, cluster, 20, run) as other,
        ):
            own_scheduler.send(signal.SIGSTOP)
            goes_on.set()
            await until_state(cluster.global_step, SourceState.LOST)
            own_scheduler.send(signal.SIGCONT)
        assert isinstance(failed.error, StepSourceLostError)
        assert one.value + other.value == waited.value == cluster.global_step.value == 20
        assert (await cluster.statistics())["num_held"] == cluster.global_step.epoch == 0


async def test_a_scheduler_that_is_started_again_gets_the_step_of_the_checkpoint(
    own_scheduler: Scheduler, training: str, tmp_path: Path
) -> None:
    saver = StateDictSaver(weights={"w": np.zeros(3)})
    saving = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
    late = DaskCluster(own_scheduler.address, training, timeout_secs=30)
    async with (
        native(own_scheduler.address) as client,
        DaskCluster(client, training, heartbeat_secs=0.5) as cluster,
    ):
        async with MonitoredSession([saving], cluster.session_creator(step)) as session:
            await session.run("loss")
            own_scheduler.kill()
            await until_state(cluster.global_step, SourceState.LOST)
            async with in_task(late.open), in_task(anyio.to_thread.run_sync, own_scheduler.start):
                await session.run("loss")  # waits for the scheduler, and runs again
            assert session.global_step.value == 2
            async with aclosing(late):
                assert await late.advance() == 3


async def test_a_cut_connection_comes_back_and_no_step_is_lost_or_counted_twice(join: Join) -> None:
    async with join() as cluster:
        found: list[int] = []

        async def count() -> None:
            for _ in range(150):
                found.append(await cluster.advance())

        async with anyio.create_task_group() as group:
            group.start_soon(count)
            for reached in (30, 60, 90):
                await cluster.global_step.wait_for(reached)
                cut(cluster)
        assert found == list(range(1, 151))
        assert (await cluster.statistics())["num_processes"] == 1


async def test_it_is_soon_checked_whether_a_scheduler_that_is_away_will_be_back(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def refused(address: str, timeout: float, **options: Any) -> Any:
        tried.append(timeout)
        if len(tried) < 4:
            raise ConnectionRefusedError
        return await connect(address, timeout, **options)

    async with join() as cluster:
        await cluster.advance()
        monkeypatch.setattr("asynchooks.distributed._stream.connect", refused)
        cut(cluster)
        assert await cluster.advance() == 2
    assert tried == [0.5, 1.0, 2.0, 3.0]


async def test_the_stop_is_exact_although_connections_are_cut_and_runs_cancelled_at_any_moment(
    join: Join,
) -> None:
    async def one(cluster: DaskCluster, seed: int) -> None:
        rng = random.Random(seed)
        hooks = [StopAtStepHook(last_step=100)]
        async with MonitoredSession(hooks, cluster.session_creator(slow_step)) as session:
            while not session.should_stop():
                with anyio.move_on_after(rng.uniform(0.0, 0.01)):
                    await session.run("loss")

    async with join() as here, join() as there:
        async with anyio.create_task_group() as group:
            for seed, cluster in enumerate([here, there, here, there]):
                group.start_soon(one, cluster, seed)
            for reached in (20, 40, 60, 80):
                await here.global_step.wait_for(reached)
                cut(here)
        await until(here, num_held=0)
        assert (await here.statistics())["step"] == 100
        assert here.global_step.value == there.global_step.value == 100


@pytest.mark.parametrize("lose", [Proxy.refuse, Proxy.cut])
async def test_a_lost_network_is_found_again_and_the_stop_is_exact_although_others_went_on(
    lose: Callable[[Proxy], None], scheduler: Scheduler, training: str
) -> None:
    healed = anyio.Event()

    async def run_late() -> dict[str, float]:
        await healed.wait()
        return {"loss": 0.0}

    times = {"heartbeat_secs": QUICK, "lease_secs": 0.9}
    address = f"{scheduler.host}:{PORT}"
    with closing(Proxy(address)) as proxy:
        async with DaskCluster(scheduler.address, training) as near:
            async with DaskCluster(f"tcp://{proxy.address}", training, **times) as far:
                async with in_task(train_here, far, 40, run_late) as late:
                    await until(near, num_held=1)
                    lose(proxy)
                    await until_state(far.global_step, SourceState.LOST)
                    assert await train_here(near, 40) == 40  # the credit of the far one among them
                    assert far.global_step.value == 0
                    proxy.heal()
                    healed.set()
                assert late.value == 1
                assert far.global_step.value == (await near.statistics())["step"] == 40
                assert far.global_step.epoch == 0
                await until_state(far.global_step, SourceState.LIVE)
            await until(near, num_processes=1)


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
        await until(cluster, num_processes=1)


@ONE_BACKEND
async def test_waits_end_when_a_parameter_server_and_its_scheduler_are_lost_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # it waits for half a minute otherwise
    monkeypatch.setattr("asynchooks.distributed._remote._GIVE_UP_SECS", 1.0)
    monkeypatch.setattr("asynchooks.distributed._remote._ASK_SECS", 0.5)
    with a_scheduler() as scheduler, a_worker(scheduler), a_worker(scheduler):
        async with Client(
            scheduler.address, asynchronous=True, set_as_default=False, timeout=3
        ) as client:
            await client.wait_for_workers(2)
            pids = await client.run(os.getpid)
            losses: list[Any] = [partial(scheduler.send, signal.SIGSTOP), scheduler.kill]
            for place, lose in zip(pids, losses, strict=True):
                async with host_parameter_server(
                    client, np.ones(2), Synchronous(), num_workers=2, worker=place
                ) as server:
                    await server.begin_step(0)
                    await server.push(0, np.ones(2), 0)
                    async with (
                        in_task(server.global_step.wait_for, 5) as waited,
                        in_task(server.end_step, 0) as ended,
                    ):
                        os.kill(pids[place], signal.SIGKILL)
                        lose()
                scheduler.send(signal.SIGCONT)
                assert isinstance(ended.error, StepSourceLostError)
                assert re.search("parameter server at .* is lost", str(ended.error))
                assert isinstance(waited.error, StepUnreachableError)
