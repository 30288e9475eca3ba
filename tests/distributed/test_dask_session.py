"""One training on several processes: they wait for each other and stop exactly, by Dask."""

from __future__ import annotations

import gc
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from distributed import Client, LocalCluster, get_worker

from asynchooks import (
    CheckpointSaverHook,
    FetchError,
    GlobalStepWaiterHook,
    MonitoredSession,
    PreemptionError,
    SessionRunHook,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.distributed import DaskCluster

from .processes import Scheduler, elsewhere, gathered
from .sessions import step, train, train_here, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


@pytest.mark.parametrize("last_step", [1, 7, 250])
async def test_three_processes_of_four_sessions_stop_exactly(
    scheduler: Scheduler, pool: ProcessPoolExecutor, anyio_backend: str, training: str,
    last_step: int,
) -> None:  # fmt: skip
    async with DaskCluster(scheduler.address, training) as cluster:
        args = (scheduler.address, training, last_step, 4)
        found = await gathered(*(elsewhere(pool, anyio_backend, train, *args) for _ in range(3)))
        assert sum(num_runs for num_runs, _ in found) == last_step
        assert {value for _, value in found} == {last_step}
        assert (await cluster.statistics())["num_held"] == 0


async def test_slow_and_fast_processes_stop_exactly(
    scheduler: Scheduler, pool: ProcessPoolExecutor, anyio_backend: str, training: str
) -> None:
    found = await gathered(
        *(
            elsewhere(pool, anyio_backend, train, scheduler.address, training, 120, 4, is_slow)
            for is_slow in (False, True, True)
        )
    )
    assert sum(num_runs for num_runs, _ in found) == 120


async def test_a_limit_stops_processes_that_set_none(
    scheduler: Scheduler, pool: ProcessPoolExecutor, anyio_backend: str, training: str
) -> None:
    found = await gathered(
        *(
            elsewhere(pool, anyio_backend, train, scheduler.address, training, last_step, 2, True)
            for last_step in (None, None, 100)
        )
    )
    assert sum(num_runs for num_runs, _ in found) == 100


async def test_workers_start_when_other_processes_have_come_far_enough(
    scheduler: Scheduler, pool: ProcessPoolExecutor, anyio_backend: str, training: str
) -> None:
    first_steps: list[int] = []
    async with DaskCluster(scheduler.address, training) as cluster:

        async def late(first: int) -> None:
            hooks = [GlobalStepWaiterHook(first), StopAtStepHook(last_step=60)]
            async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
                await session.run("loss")
                first_steps.append(session.global_step.value)

        async with anyio.create_task_group() as group:
            for first in (20, 40):
                group.start_soon(late, first)
            await wait_until(cluster, "num_waiting", 1)
            args = (scheduler.address, training, 50, 1, True)
            group.start_soon(elsewhere, pool, anyio_backend, train, *args)
    assert len(first_steps) == 2
    assert first_steps[0] > 20
    assert first_steps[1] > 40


async def test_collections_leave_old_objects_out_while_a_cluster_is_open(
    scheduler: Scheduler, training: str
) -> None:
    gc.unfreeze()
    async with DaskCluster(scheduler.address, training):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


async def test_joining_a_training_that_has_ended_logs_a_warning(
    scheduler: Scheduler, training: str, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]

    async def run_to(last_step: int) -> int:
        num_runs = 0
        async with DaskCluster(scheduler.address, training) as cluster:
            hooks = [StopAtStepHook(last_step=last_step)]
            async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
                while not session.should_stop():
                    await session.run("loss")
                    num_runs += 1
        return num_runs

    assert await run_to(3) == 3
    assert warnings() == []
    assert await run_to(3) == 0
    (warning,) = warnings()
    assert "has ended at step 3, its limit" in warning
    assert "forget()" in warning
    assert await run_to(5) == 2, "a higher limit lets it go on"


async def test_the_step_after_a_run_is_that_of_all_processes(
    scheduler: Scheduler, training: str
) -> None:
    seen = []

    class See(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append(run_context.global_step.value)

    async with DaskCluster(scheduler.address, training) as here:
        async with DaskCluster(scheduler.address, training) as there:
            async with MonitoredSession([See()], here.session_creator(step)) as session:
                await session.run("loss")
                await there.advance(10)
                await session.run("loss")
    assert seen == [1, 12]


async def test_a_step_function_may_return_the_step_itself(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training) as here:
        async with DaskCluster(scheduler.address, training) as there:
            creator = here.session_creator(lambda: {"global_step": 70})
            async with MonitoredSession([], creator) as session:
                await session.run("global_step")
            assert await there.advance(0) == 70


async def test_a_run_whose_fetch_is_wrong_counts_and_leaves_no_ticket(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training) as cluster:
        hooks = [StopAtStepHook(last_step=9)]
        with pytest.raises(FetchError, match="'lost'"):
            async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
                await session.run("lost")
        await wait_until(cluster, "num_held", 0)
        assert (await cluster.statistics())["step"] == 1


async def test_a_failed_run_gives_its_ticket_to_others(scheduler: Scheduler, training: str) -> None:
    def fail() -> None:
        raise ValueError("broken")

    async with DaskCluster(scheduler.address, training) as here:
        async with DaskCluster(scheduler.address, training) as there:
            with pytest.raises(ValueError, match="broken"):
                creator = here.session_creator(fail)
                async with MonitoredSession([StopAtStepHook(last_step=1)], creator) as session:
                    await session.run("loss")
            async with MonitoredSession([], there.session_creator(step)) as session:
                await session.run("loss")
                assert session.should_stop()


async def test_a_session_that_opens_late_learns_the_limit(
    scheduler: Scheduler, training: str
) -> None:
    assert await train(scheduler.address, training, 5, 1) == (5, 5)
    assert await train(scheduler.address, training, None, 1) == (0, 5)
    assert await train(scheduler.address, training, 8, 2) == (3, 8)


async def test_a_cluster_that_keeps_the_limit_does_not_count_runs(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training, published_only=True) as cluster:
        hooks = [StopAtStepHook(last_step=2)]
        async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
            for _ in range(5):
                await session.run("loss")
            assert cluster.global_step.value == 0
            await cluster.publish(2)
            assert session.should_stop()


async def here_and_in_dask(name: str) -> tuple[int, int]:
    return await train(get_worker().scheduler.address, name, 40, 4)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_sessions_run_in_tasks_of_dask_workers(training: str) -> None:
    async with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
            asynchronous=True,
        ) as workers,
        Client(workers, asynchronous=True) as client,
        DaskCluster(client, training) as cluster,
    ):  # fmt: skip
        addresses = list(await client.nthreads())
        tasks = [
            client.submit(here_and_in_dask, training, workers=[each], pure=False)
            for each in addresses
        ]
        found = await client.gather(tasks)
        assert sum(num_runs for num_runs, _ in found) == 40
        assert (await cluster.statistics())["step"] == 40


async def test_sessions_that_restore_a_checkpoint_at_the_same_time_begin_one_epoch(
    scheduler: Scheduler, training: str, tmp_path: Path
) -> None:
    num_lost = 0
    all_lost = anyio.Event()

    async def fail_at_3() -> dict[str, float]:
        nonlocal num_lost
        if cluster.global_step.value == 3 and not all_lost.is_set():
            num_lost += 1
            if num_lost == 4:
                all_lost.set()
            await all_lost.wait()
            raise PreemptionError("the machine was taken away")
        return {"loss": 0.0}

    async def one(place: int) -> None:
        saver = StateDictSaver(weights={"w": np.zeros(1)})
        directory = tmp_path / str(place)
        hooks = [
            CheckpointSaverHook(directory, save_steps=1, saver=saver), StopAtStepHook(last_step=9),
        ]  # fmt: skip
        async with MonitoredSession(hooks, cluster.session_creator(fail_at_3)) as session:
            while not session.should_stop():
                await session.run("loss")

    async with DaskCluster(scheduler.address, training) as cluster:
        await cluster.publish(3)
        async with anyio.create_task_group() as group:
            for place in range(4):
                group.start_soon(one, place)
        found = await cluster.statistics()
    assert num_lost == 4
    assert (found["step"], found["epoch"].partition(".")[2]) == (9, "1")


@pytest.mark.parametrize("restored", [NotImplemented, None], ids=["no restore", "none saved"])
async def test_a_recovery_without_a_checkpoint_keeps_the_step(
    restored: Any, scheduler: Scheduler, training: str
) -> None:
    class RestoresNothing(SessionRunHook):
        async def restore_model(self, session: Any) -> Any:
            return restored

    async def fail_once_at_3() -> dict[str, float]:
        if cluster.global_step.value == 3 and not failures:
            failures.append(PreemptionError("the machine was taken away"))
            raise failures[0]
        return {"loss": 0.0}

    failures: list[PreemptionError] = []
    async with DaskCluster(scheduler.address, training) as cluster:
        hooks = [RestoresNothing(), StopAtStepHook(last_step=6)]
        async with MonitoredSession(hooks, cluster.session_creator(fail_once_at_3)) as session:
            while not session.should_stop():
                await session.run("loss")
        found = await cluster.statistics()
    assert len(failures) == 1
    assert (found["step"], found["epoch"].partition(".")[2]) == (6, "0")


async def test_the_stop_is_exact_after_many_restarts(scheduler: Scheduler, training: str) -> None:
    async with DaskCluster(scheduler.address, training) as here:
        async with DaskCluster(scheduler.address, training) as there:
            async with anyio.create_task_group() as group:
                for cluster in (here, there, here, there):
                    group.start_soon(train_here, cluster, 100)
                for place in range(30):
                    await (here, there)[place % 2].restart(place)
            found = await here.statistics()
            assert (found["step"], found["num_held"]) == (100, 0)
            assert found["epoch"].endswith(".30")
            assert there.global_step.value == 100


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_sessions_stop_exactly_on_uvloop(scheduler: Scheduler, training: str) -> None:
    pytest.importorskip("uvloop")
    assert await train(scheduler.address, training, 50, 4) == (50, 50)
    with Client(scheduler.address, set_as_default=False) as client:
        async with DaskCluster(client, training) as cluster:
            assert await cluster.advance() == 51
