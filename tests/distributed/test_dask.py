"""One training on several processes: they wait for each other and stop exactly, by Dask."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import anyio
import pytest
from distributed import Client, LocalCluster, get_worker

from asynchooks import (
    FetchError,
    GlobalStepWaiterHook,
    MonitoredSession,
    SessionRunHook,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.distributed import DaskCluster, SourceState

from .processes import Scheduler, elsewhere, gathered

pytestmark = pytest.mark.anyio


def step() -> dict[str, float]:
    return {"loss": 0.0}


async def slow_step() -> dict[str, float]:
    await anyio.sleep(0.002)
    return {"loss": 0.0}


async def train(
    address: str, training: str, last_step: int | None, num_sessions: int, is_slow: bool = False
) -> tuple[int, int]:
    """(Runs that were made here, the step at the end)."""
    num_runs = 0
    async with DaskCluster(address, training) as cluster:
        creator = cluster.session_creator(slow_step if is_slow else step)

        async def one() -> None:
            nonlocal num_runs
            hooks = [] if last_step is None else [StopAtStepHook(last_step=last_step)]
            async with MonitoredSession(hooks, creator) as session:
                while not session.should_stop():
                    await session.run("loss")
                    num_runs += 1

        async with anyio.create_task_group() as group:
            for _ in range(num_sessions):
                group.start_soon(one)
        return num_runs, cluster.global_step.value


async def wait_until(cluster: DaskCluster, key: str, value: int) -> None:
    """Only the scheduler knows: it is asked again and again."""
    with anyio.fail_after(20):
        while (await cluster.statistics())[key] != value:  # noqa: ASYNC110
            await anyio.sleep(0.005)


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


async def test_a_step_function_may_say_the_step_itself(scheduler: Scheduler, training: str) -> None:
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


async def test_a_training_is_taken_up_until_it_is_forgotten(
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


async def test_a_cluster_that_keeps_the_limit_does_not_count_runs(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training, keeps_limit=True) as cluster:
        hooks = [StopAtStepHook(last_step=2)]
        async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
            for _ in range(5):
                await session.run("loss")
            assert cluster.global_step.value == 0
            await cluster.publish(2)
            assert session.should_stop()


async def test_while_a_process_waits_only_heartbeats_leave_it(
    scheduler: Scheduler, training: str
) -> None:
    async with DaskCluster(scheduler.address, training, heartbeat_secs=0.3) as cluster:
        async with anyio.create_task_group() as group:
            for each in range(50):
                group.start_soon(cluster.global_step.wait_for, 100 + each)
            await wait_until(cluster, "num_waiting", 1)
            before = cluster.source.num_said
            await anyio.sleep(1.0)
            assert cluster.source.num_said - before <= 12  # one in 0.1 s, and the clock's slack
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
    with pytest.raises(StepUnreachableError, match="moved no more"):
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
