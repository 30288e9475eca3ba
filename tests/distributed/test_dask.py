"""A training on several processes through Dask: sessions, waits, errors, leaving, and TLS."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import dask
import distributed
import numpy as np
import pytest
from anyio.abc import SocketAttribute
from distributed import Client, LocalCluster, get_worker

from asynchooks import (
    CheckpointSaverHook,
    FetchError,
    GlobalStepWaiterHook,
    MonitoredSession,
    PreemptionError,
    SessionRunHook,
    StateDictSaver,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.distributed import DaskCluster, SourceState

from ..support.helpers import in_task
from .processes import Scheduler, a_scheduler, elsewhere, gathered, own_host
from .sessions import Join, slow_step, step, train, train_here, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.faults]


async def test_two_trainings_by_different_names_do_not_meet(
    scheduler: Scheduler, join: Join, training: str
) -> None:
    async with join() as one, DaskCluster(scheduler.address, training + " too") as other:
        assert await one.advance(3) == 3
        assert await other.advance() == 1


async def test_a_waiter_goes_on_when_another_process_advances(join: Join) -> None:
    async with join() as waiting, join() as moving:
        async with in_task(waiting.global_step.wait_for, 5) as box:
            await wait_until(moving, "num_waiting", 1)
            assert await moving.advance(4) == 4
            assert await moving.advance() == 5
    assert box.value == 5


async def test_no_wait_misses_an_update_that_is_under_way(join: Join) -> None:
    async with join() as waiting, join() as moving, anyio.create_task_group() as group:

        async def move() -> None:
            for _ in range(200):
                await moving.advance()

        group.start_soon(move)
        for step in range(1, 201):
            assert await waiting.global_step.wait_for(step) >= step


async def test_a_session_on_a_closed_cluster_says_so(join: Join) -> None:
    async with join() as cluster:
        creator = cluster.session_creator(step)
    with pytest.raises(StepUnreachableError, match="its DaskCluster is closed"):
        async with MonitoredSession([], creator) as session:
            await session.run("loss")


async def test_a_later_cluster_continues_a_training_until_it_is_forgotten(join: Join) -> None:
    async with join() as cluster:
        await cluster.advance(4)
    async with join() as cluster:
        assert cluster.global_step.value == 4
        await cluster.forget()
    async with join() as cluster:
        assert cluster.global_step.value == 0


async def test_a_restart_takes_the_step_back_everywhere(join: Join) -> None:
    async with join() as here, join() as there:
        await here.advance(9)
        await there.restart(3)
        assert await here.advance(0) == 3
        assert here.global_step.value == 3
        assert here.global_step.epoch == there.global_step.epoch == 1


async def test_while_a_process_waits_nothing_but_heartbeats_leaves_it(join: Join) -> None:
    never: dict[str, Any] = {"heartbeat_secs": 1e4, "lease_secs": 1e4}
    async with join(**never) as cluster, anyio.create_task_group() as group:
        group.start_soon(cluster.global_step.wait_for, 100)
        await wait_until(cluster, "num_waiting", 1)
        before = cluster.source.num_messages
        for each in range(1, 50):  # the scheduler need not know of what comes later
            group.start_soon(cluster.global_step.wait_for, 100 + each)
        await anyio.sleep(0.3)
        assert cluster.source.num_messages == before
        await cluster.advance(200)


async def test_a_cancelled_waiter_leaves_nothing_behind(join: Join) -> None:
    async with join() as cluster:
        with anyio.move_on_after(0.05):
            await cluster.global_step.wait_for(10)
        assert cluster.global_step.statistics().tasks_waiting_for_step == 0
    async with join() as cluster:
        found = await cluster.statistics()
        assert (found["num_processes"], found["num_waiting"]) == (1, 0)


async def test_waits_end_when_the_cluster_is_closed(join: Join) -> None:
    cluster = await join().open()
    async with in_task(cluster.global_step.wait_for, 10) as box:
        await wait_until(cluster, "num_waiting", 1)
        await cluster.aclose()
    await cluster.aclose()
    assert isinstance(box.error, StepUnreachableError)
    assert "can no longer come" in str(box.error)
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


@pytest.mark.parametrize(
    ("last_steps", "num_sessions", "are_slow"),
    [((120, 120, 120), 4, (False, True, True)), ((None, None, 100), 2, (True, True, True))],
    ids=["slow and fast", "two set no limit"],
)
async def test_unequal_processes_stop_exactly(
    scheduler: Scheduler, pool: ProcessPoolExecutor, anyio_backend: str, training: str,
    last_steps: Any, num_sessions: int, are_slow: Any,
) -> None:  # fmt: skip
    options = zip(last_steps, [num_sessions] * 3, are_slow, strict=True)
    found = await gathered(
        *(elsewhere(pool, anyio_backend, train, scheduler.address, training, *each)
          for each in options)
    )  # fmt: skip
    assert sum(num_runs for num_runs, _ in found) == last_steps[-1]


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


async def test_collections_leave_old_objects_out_while_a_cluster_is_open(join: Join) -> None:
    gc.unfreeze()
    async with join():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


async def test_joining_a_training_that_has_ended_logs_a_warning(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]

    async def run_to(last_step: int) -> int:
        async with join() as cluster:
            return await train_here(cluster, last_step)

    assert await run_to(3) == 3
    assert warnings() == []
    assert await run_to(3) == 0
    (warning,) = warnings()
    assert "has ended at step 3, its limit" in warning
    assert "forget()" in warning
    assert await run_to(5) == 2, "a higher limit lets it go on"


async def test_the_step_after_a_run_is_that_of_all_processes(join: Join) -> None:
    seen = []

    class See(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append(run_context.global_step.value)

    async with join() as here, join() as there:
        async with MonitoredSession([See()], here.session_creator(step)) as session:
            await session.run("loss")
            await there.advance(10)
            await session.run("loss")
    assert seen == [1, 12]


async def test_a_step_function_may_return_the_step_itself(join: Join) -> None:
    async with join() as here, join() as there:
        creator = here.session_creator(lambda: {"global_step": 70})
        async with MonitoredSession([], creator) as session:
            await session.run("global_step")
        assert await there.advance(0) == 70


async def test_a_run_that_says_that_the_step_has_not_moved_counts_as_none(join: Join) -> None:
    async with join() as here:
        creator = here.session_creator(lambda: {"global_step": 0})
        async with MonitoredSession([], creator) as session:
            await session.run("global_step")
        assert await here.advance(0) == 0


async def test_a_run_whose_fetch_is_wrong_does_not_count_in_a_later_epoch(join: Join) -> None:
    async def restarting() -> dict[str, float]:
        await there.restart(5)
        await here.advance(0)  # and with it the news
        return {"loss": 0.0}

    async with join() as here, join() as there:
        with pytest.raises(FetchError, match="'lost'"):
            async with MonitoredSession([], here.session_creator(restarting)) as session:
                await session.run("lost")
        assert await there.advance(0) == 5


async def test_a_run_whose_fetch_is_wrong_counts_and_leaves_no_ticket(join: Join) -> None:
    async with join() as cluster:
        hooks = [StopAtStepHook(last_step=9)]
        with pytest.raises(FetchError, match="'lost'"):
            async with MonitoredSession(hooks, cluster.session_creator(step)) as session:
                await session.run("lost")
        await wait_until(cluster, "num_held", 0)
        assert (await cluster.statistics())["step"] == 1


async def test_a_failed_run_gives_its_ticket_to_others(join: Join) -> None:
    def fail() -> None:
        raise ValueError("broken")

    async with join() as here, join() as there:
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
    join: Join, tmp_path: Path
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

    async with join() as cluster:
        await cluster.advance(3)
        async with anyio.create_task_group() as group:
            for place in range(4):
                group.start_soon(one, place)
        found = await cluster.statistics()
    assert num_lost == 4
    assert (found["step"], found["epoch"].partition(".")[2]) == (9, "1")


@pytest.mark.parametrize("restored", [NotImplemented, None], ids=["no restore", "none saved"])
async def test_a_recovery_without_a_checkpoint_keeps_the_step(restored: Any, join: Join) -> None:
    class RestoresNothing(SessionRunHook):
        async def restore_model(self, session: Any) -> Any:
            return restored

    async def fail_once_at_3() -> dict[str, float]:
        if cluster.global_step.value == 3 and not failures:
            failures.append(PreemptionError("the machine was taken away"))
            raise failures[0]
        return {"loss": 0.0}

    failures: list[PreemptionError] = []
    async with join() as cluster:
        hooks = [RestoresNothing(), StopAtStepHook(last_step=6)]
        async with MonitoredSession(hooks, cluster.session_creator(fail_once_at_3)) as session:
            while not session.should_stop():
                await session.run("loss")
        found = await cluster.statistics()
    assert len(failures) == 1
    assert (found["step"], found["epoch"].partition(".")[2]) == (6, "0")


async def test_the_stop_is_exact_after_many_restarts(join: Join) -> None:
    async with join() as here, join() as there:
        async with anyio.create_task_group() as group:
            for cluster in (here, there, here, there):
                group.start_soon(train_here, cluster, 100)
            for place in range(30):
                await (here, there)[place % 2].restart(place)
        found = await here.statistics()
        assert (found["step"], found["num_held"]) == (100, 0)
        assert found["epoch"].endswith(".30")
        assert there.global_step.value == 100


async def test_the_stop_is_exact_although_runs_are_cancelled_at_any_moment(join: Join) -> None:
    async def one(cluster: DaskCluster, seed: int) -> None:
        rng = random.Random(seed)
        hooks = [StopAtStepHook(last_step=80)]
        async with MonitoredSession(hooks, cluster.session_creator(slow_step)) as session:
            while not session.should_stop():
                with anyio.move_on_after(rng.uniform(0.0, 0.006)):
                    await session.run("loss")

    async with join() as here, join() as there:
        async with anyio.create_task_group() as group:
            for seed, cluster in enumerate([here, there, here, there]):
                group.start_soon(one, cluster, seed)
        await wait_until(here, "num_held", 0)
        assert (await here.statistics())["step"] == 80
        assert here.global_step.value == there.global_step.value == 80


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_sessions_stop_exactly_on_uvloop(scheduler: Scheduler, training: str) -> None:
    pytest.importorskip("uvloop")
    assert await train(scheduler.address, training, 50, 4) == (50, 50)
    with Client(scheduler.address, set_as_default=False) as client:
        async with DaskCluster(client, training) as cluster:
            assert await cluster.advance() == 51


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


def hold_a_ticket(address: str, training: str, lease_secs: float) -> None:
    anyio.run(_hold_a_ticket, address, training, lease_secs)


@asynccontextmanager
async def holder_of_a_ticket(
    scheduler: Scheduler, training: str, lease_secs: float = 30.0
) -> AsyncIterator[tuple[DaskCluster, int]]:
    """Another process, by its id, with a ticket that it keeps; killed at the end."""
    args = (scheduler.address, training, lease_secs)
    process = multiprocessing.get_context("spawn").Process(target=hold_a_ticket, args=args)
    process.start()
    assert process.pid is not None
    async with DaskCluster(scheduler.address, training) as cluster:
        await wait_until(cluster, "num_held", 1)
        yield cluster, process.pid
    process.kill()
    process.join()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tickets_of_a_killed_process_are_run_by_others_at_once(
    scheduler: Scheduler, training: str
) -> None:
    async with holder_of_a_ticket(scheduler, training) as (cluster, process):
        async with in_task(train_here, cluster, 10) as box:
            await wait_until(cluster, "step", 9)  # the last one belongs to the other
            await wait_until(cluster, "num_wanting", 1)
            os.kill(process, signal.SIGKILL)
            with anyio.fail_after(20):  # before its lease ends
                await cluster.global_step.wait_for(10)
    assert box.value == 10


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_process_that_is_silent_for_its_lease_loses_its_tickets(
    scheduler: Scheduler, training: str
) -> None:
    async with holder_of_a_ticket(scheduler, training, 1.0) as (cluster, process):
        os.kill(process, signal.SIGSTOP)
        await wait_until(cluster, "num_processes", 1)
        assert await train_here(cluster, 10) == 10


async def test_waits_end_when_the_client_is_closed(scheduler: Scheduler, training: str) -> None:
    client = Client(scheduler.address, set_as_default=False)
    cluster = DaskCluster(client, training, heartbeat_secs=0.3)
    async with cluster, in_task(cluster.global_step.wait_for, 10) as box:
        await wait_until(cluster, "num_waiting", 1)
        # as other code in the process may do it
        await anyio.to_thread.run_sync(client.close)
    assert isinstance(box.error, StepUnreachableError)
    assert "can no longer come" in str(box.error)
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


async def test_a_process_that_leaves_without_a_message_leaves_no_wait_behind(join: Join) -> None:
    async with join() as cluster:
        for _ in range(3):
            with anyio.CancelScope() as scope:
                async with join() as other, anyio.create_task_group() as group:
                    group.start_soon(other.global_step.wait_for, 100)
                    await wait_until(cluster, "num_waiting", 1)
                    scope.cancel()
        await wait_until(cluster, "num_processes", 1)
        assert (await cluster.statistics())["num_waiting"] == 0


ONE_BACKEND = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For tests that start a scheduler of their own, which takes a second or more."""


def test_something_else_than_a_client_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"client is 8786; give a distributed\.Client"):
        DaskCluster(8786)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"name": ""}, "name is ''"),
        (ValueError, {"heartbeat_secs": 0}, "heartbeat_secs is 0; give finite seconds > 0"),
        (ValueError, {"heartbeat_secs": 9, "lease_secs": 3}, "no shorter than a heartbeat .9 s"),
        (ValueError, {"timeout_secs": float("inf")}, "timeout_secs is inf"),
        (TypeError, {"lease_secs": "30"}, "lease_secs is '30'"),
    ],
)
def test_values_out_of_range_are_named(
    error: type[Exception], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=message):
        DaskCluster("tcp://127.0.0.1:1", **options)


async def test_an_address_without_an_answer_is_named_in_time() -> None:
    address = f"tcp://{own_host()}:8786"
    with pytest.raises(ConnectionError, match=f"{address} within 0.5 s"):
        await DaskCluster(address, timeout_secs=0.5).open()


@pytest.mark.parametrize(
    "words", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, b"\0" * 64, b"\xff" * 64]
)
async def test_something_else_that_answers_is_no_scheduler(words: bytes) -> None:
    async def answer(stream: Any) -> None:
        async with stream:
            await stream.send(words)
            await anyio.sleep_forever()

    listeners = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listeners.extra(SocketAttribute.local_port)
    async with listeners, anyio.create_task_group() as group:
        group.start_soon(listeners.serve, answer)
        with pytest.raises(ConnectionError, match=f"no Dask scheduler answers at .*:{port} "):
            await DaskCluster(f"tcp://127.0.0.1:{port}", timeout_secs=0.5).open()
        group.cancel_scope.cancel()


async def test_a_malformed_address_is_named() -> None:
    with pytest.raises(ConnectionError, match="nowhere://at all"):
        await DaskCluster("nowhere://at all", timeout_secs=0.5).open()


async def test_a_closed_client_is_refused(scheduler: Scheduler) -> None:
    client = Client(scheduler.address, set_as_default=False)
    client.close()
    with pytest.raises(ConnectionError, match="closed"):
        await DaskCluster(client).open()


async def test_a_cluster_that_is_not_open_says_how_to_open_it() -> None:
    cluster = DaskCluster("tcp://127.0.0.1:1")
    with pytest.raises(RuntimeError, match="async with DaskCluster"):
        await cluster.advance()
    with pytest.raises(RuntimeError, match="async with DaskCluster"):
        async with MonitoredSession([], cluster.session_creator(dict)):
            pass


async def test_a_cluster_opens_once(join: Join) -> None:
    async with join() as cluster:
        with pytest.raises(RuntimeError, match="opened before"):
            await cluster.open()


@pytest.mark.parametrize(("error", "step"), [(ValueError, -1), (TypeError, 1.5)])
async def test_steps_are_integers_from_zero_on(
    join: Join, error: type[Exception], step: Any
) -> None:
    async with join() as cluster:
        with pytest.raises(error, match=f"step is {step}; give an integer >= 0"):
            await cluster.restart(step)


@ONE_BACKEND
async def test_another_version_at_the_scheduler_is_named() -> None:
    other = "import asynchooks._version as module; module.__version__ = '99.0'"
    with a_scheduler(before=other) as scheduler:
        with pytest.raises(
            RuntimeError, match=rf"{scheduler.address} runs asynchooks 99\.0, this process "
        ):
            await DaskCluster(scheduler.address).open()


@ONE_BACKEND
async def test_a_scheduler_where_asynchooks_is_missing_says_what_to_do() -> None:
    with a_scheduler(before="import sys; sys.modules['asynchooks'] = None") as scheduler:
        with pytest.raises(
            RuntimeError, match=r"No module named 'asynchooks.*Install asynchooks where the sche"
        ):
            await DaskCluster(scheduler.address).open()


@ONE_BACKEND
async def test_a_scheduler_that_takes_no_plugin_says_what_to_do() -> None:
    forbidden = {"DASK_DISTRIBUTED__SCHEDULER__BLOCKED_HANDLERS": "['register_scheduler_plugin']"}
    with a_scheduler(**forbidden) as scheduler:
        with pytest.raises(RuntimeError, match="dask scheduler --preload"):
            await DaskCluster(scheduler.address).open()


@ONE_BACKEND
async def test_a_scheduler_that_has_preloaded_the_plugin_needs_no_registration() -> None:
    forbidden = {"DASK_DISTRIBUTED__SCHEDULER__BLOCKED_HANDLERS": "['register_scheduler_plugin']"}
    preload = {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": "['asynchooks.distributed._dask_plugin']"}
    with a_scheduler(**forbidden, **preload) as scheduler:
        async with DaskCluster(scheduler.address) as cluster:
            assert await cluster.advance() == 1


def test_without_dask_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "distributed.py").write_text(
        "raise ModuleNotFoundError('gone', name='distributed')\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from asynchooks.distributed import DaskCluster"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'asynchooks[dask]'" in done.stderr


@pytest.fixture(scope="module")
def security() -> Any:
    pytest.importorskip("cryptography")  # makes the certificates
    return distributed.Security.temporary()


@pytest.fixture(scope="module")
def tls_cluster(security: Any) -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=0,
        security=security,
        protocol="tls://",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    ) as cluster:
        yield cluster


@pytest.fixture
def configured(security: Any, tmp_path: Path) -> Iterator[None]:
    texts = {
        "ca-file": security.tls_ca_file,
        "client.cert": security.tls_client_cert,
        "client.key": security.tls_client_key,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    paths = {f"distributed.comm.tls.{name}": str(tmp_path / name) for name in texts}
    with dask.config.set(paths):
        yield


@pytest.mark.usefixtures("configured")
async def test_certificates_of_the_configuration_are_used_for_an_address(
    tls_cluster: Any, training: str
) -> None:
    assert tls_cluster.scheduler_address.startswith("tls://")
    async with DaskCluster(tls_cluster.scheduler_address, training) as cluster:
        assert await train_here(cluster, 10) == cluster.global_step.value == 10


async def test_certificates_of_a_client_are_used(
    tls_cluster: Any, security: Any, training: str
) -> None:
    with distributed.Client(tls_cluster, security=security, set_as_default=False) as client:
        async with DaskCluster(client, training) as cluster:
            assert await train_here(cluster, 10) == cluster.global_step.value == 10


async def test_without_certificates_the_error_names_what_is_missing(tls_cluster: Any) -> None:
    address = tls_cluster.scheduler_address
    with pytest.raises(ConnectionError, match=f"no certificates for {address}.*comm.tls"):
        await DaskCluster(address).open()


async def test_a_connection_without_tls_is_refused(tls_cluster: Any) -> None:
    address = tls_cluster.scheduler_address.replace("tls://", "tcp://")
    with pytest.raises(ConnectionError, match=f"no Dask scheduler answers at {address}"):
        await DaskCluster(address, timeout_secs=0.5).open()
