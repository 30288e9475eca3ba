"""A training on several processes through Dask: sessions, waits, errors, leaving, and TLS."""

import gc
import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import dask
import distributed
import numpy as np
import pytest
from anyio.abc import SocketAttribute
from distributed import Client

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
    __version__,
)
from asynchooks.distributed import DaskCluster, SourceState

from ..support.helpers import in_task
from .clusters import comes, native, until
from .processes import Scheduler, a_scheduler, elsewhere, gathered, own_host
from .sessions import QUICK, Join, run_once, step, train, train_here

pytestmark = pytest.mark.faults

ONE_BACKEND = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For what happens in other processes, and for tests that start a scheduler of their own."""


async def test_no_wait_misses_an_update_that_is_under_way(join: Join) -> None:
    async with join() as waiting, join() as moving:

        async def move() -> None:
            for _ in range(80):
                await moving.advance()

        async with anyio.create_task_group() as group:
            group.start_soon(move)
            for step in range(1, 81):
                assert await waiting.global_step.wait_for(step) >= step


async def test_a_later_cluster_continues_a_training_until_it_is_forgotten(join: Join) -> None:
    async with join() as cluster:
        await cluster.advance(4)
    async with join() as cluster:
        assert cluster.global_step.value == 4
        await cluster.forget()
    async with join() as cluster:
        assert cluster.global_step.value == 0


async def test_a_process_that_leaves_leaves_no_wait_behind(join: Join) -> None:
    async with join() as watch:
        with anyio.CancelScope() as scope:
            async with join() as cluster, in_task(cluster.global_step.wait_for, 10):
                await until(watch, num_waiting=1)
                scope.cancel()
        assert cluster.global_step.statistics().tasks_waiting_for_step == 0
        await until(watch, num_processes=1)
        assert (await watch.statistics())["num_waiting"] == 0


async def test_waits_end_when_the_cluster_is_closed(join: Join) -> None:
    cluster = await join().open()
    creator = cluster.session_creator(step)
    async with in_task(cluster.global_step.wait_for, 10) as box:
        await until(cluster, num_waiting=1)
        await cluster.aclose()
    await cluster.aclose()
    assert isinstance(box.error, StepUnreachableError)
    assert "can no longer come" in str(box.error)
    assert cluster.global_step.statistics().source is SourceState.CLOSED
    with pytest.raises(StepUnreachableError, match="gets no more news"):
        await cluster.advance()
    with pytest.raises(StepUnreachableError, match="its DaskCluster is closed"):
        await run_once(creator)


async def test_waits_end_when_the_client_is_closed(scheduler: Scheduler, training: str) -> None:
    async with native(scheduler.address) as client:
        async with DaskCluster(client, training, heartbeat_secs=QUICK) as cluster:
            async with in_task(cluster.global_step.wait_for, 10) as box:
                await until(cluster, num_waiting=1)
                closing = client.close()  # as other code in the process may do it
                if closing is not None:
                    await closing
            assert isinstance(box.error, StepUnreachableError)
            with pytest.raises(StepUnreachableError, match="client is closed"):
                await cluster.advance()
        with pytest.raises(ConnectionError, match="closed"):
            await DaskCluster(client).open()


async def test_three_processes_of_several_sessions_stop_exactly(
    scheduler: Scheduler, pool: ProcessPoolExecutor, anyio_backend: str, join: Join, training: str
) -> None:
    async with join() as cluster:
        found = await gathered(
            *(elsewhere(pool, anyio_backend, train, scheduler.address, training, 60, 3, is_slow)
              for is_slow in (False, True, True))
        )  # fmt: skip
        assert sum(num_runs for num_runs, _ in found) == 60
        assert {value for _, value in found} == {60}
        assert (await cluster.statistics())["num_held"] == 0


async def test_a_worker_starts_when_other_processes_have_come_far_enough(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    async with join() as here, join() as there:
        hooks = [GlobalStepWaiterHook(20)]
        async with MonitoredSession(hooks, here.session_creator(step)) as session:
            async with in_task(session.run, "loss"):
                await until(there, num_waiting=1)
                assert await there.advance(19) == 19
                await there.advance()
            assert session.global_step.value == 21
    assert "open workers wait" not in caplog.text  # as others may bring the step


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_sessions_stop_exactly_on_uvloop(scheduler: Scheduler, training: str) -> None:
    pytest.importorskip("uvloop")
    assert await train(scheduler.address, training, 50, 4) == (50, 50)


async def test_collections_leave_old_objects_out_while_a_cluster_is_open(join: Join) -> None:
    gc.unfreeze()
    async with join():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


async def test_joining_a_training_that_has_ended_logs_a_warning(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for last_step in (3, 3, 5):  # a higher limit lets it go on
        async with join() as cluster:
            found.append((await train_here(cluster, last_step), caplog.text.count("forget()")))
    assert found == [(3, 0), (0, 1), (2, 2)]
    assert "has ended at step 3, its limit" in caplog.text


@pytest.mark.parametrize("returned", [70, 0], ids=["the step itself", "it has not moved"])
async def test_a_step_function_may_return_the_step_itself(join: Join, returned: int) -> None:
    async with join() as here, join() as there:
        await run_once(here.session_creator(lambda: {"global_step": returned}), "global_step")
        assert await there.advance(0) == returned


async def test_a_run_whose_fetch_is_wrong_does_not_count_in_a_later_epoch(join: Join) -> None:
    async def restarting() -> dict[str, float]:
        await there.restart(5)
        await here.advance(0)  # and with it the news
        return {"loss": 0.0}

    async with join() as here, join() as there:
        with pytest.raises(FetchError, match="'lost'"):
            await run_once(here.session_creator(restarting), "lost")
        assert await there.advance(0) == 5


async def test_a_run_whose_fetch_is_wrong_counts_and_leaves_no_ticket(join: Join) -> None:
    async with join() as cluster:
        with pytest.raises(FetchError, match="'lost'"):
            await run_once(cluster.session_creator(step), "lost", last_step=9)
        await until(cluster, num_held=0)
        assert (await cluster.statistics())["step"] == 1


async def test_a_session_that_opens_late_learns_the_limit(
    scheduler: Scheduler, training: str
) -> None:
    for last_step, num_sessions, found in ((5, 1, (5, 5)), (None, 1, (0, 5)), (8, 2, (3, 8))):
        assert await train(scheduler.address, training, last_step, num_sessions) == found


async def test_sessions_that_restore_a_checkpoint_at_the_same_time_begin_one_epoch(
    join: Join, tmp_path: Path
) -> None:
    num_open = num_lost = 0

    async def fail_at_3() -> dict[str, float]:
        nonlocal num_lost
        if num_lost < 3:
            num_lost += 1
            await comes(lambda: num_lost == 3)
            raise PreemptionError("the machine was taken away")
        return {"loss": 0.0}

    async def one(place: int) -> None:
        nonlocal num_open
        saver = StateDictSaver(weights={"w": np.zeros(1)})
        saving = CheckpointSaverHook(tmp_path / str(place), save_steps=1, saver=saver)
        hooks = [StopAtStepHook(last_step=9), saving]
        async with MonitoredSession(hooks, cluster.session_creator(fail_at_3)) as session:
            num_open += 1
            await comes(lambda: num_open == 3)  # the first saves wait for runs under way
            while not session.should_stop():
                await session.run("loss")

    async with join() as cluster:
        await cluster.advance(3)
        async with anyio.create_task_group() as group:
            for place in range(3):
                group.start_soon(one, place)
        found = await cluster.statistics()
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
        await train_here(cluster, 6, fail_once_at_3, RestoresNothing())
        found = await cluster.statistics()
    assert len(failures) == 1
    assert (found["step"], found["epoch"].partition(".")[2]) == (6, "0")


async def test_the_stop_is_exact_after_many_restarts(join: Join) -> None:
    async with join() as here, join() as there:
        async with anyio.create_task_group() as group:
            for cluster in (here, there, here, there):
                group.start_soon(train_here, cluster, 50)
            for place in range(16):
                await (here, there)[place % 2].restart(place)
        found = await here.statistics()
        assert (found["step"], found["num_held"]) == (50, 0)
        assert found["epoch"].endswith(".16")
        assert there.global_step.value == 50


async def hold_a_ticket(address: str, training: str) -> None:
    async with DaskCluster(address, training) as cluster:
        await run_once(cluster.session_creator(anyio.sleep_forever), last_step=10)


@ONE_BACKEND
async def test_tickets_of_a_process_that_was_killed_are_run_by_others(
    scheduler: Scheduler, join: Join, training: str
) -> None:
    args = (hold_a_ticket, scheduler.address, training)
    spawning = multiprocessing.get_context("spawn")
    process = spawning.Process(target=anyio.run, args=args, daemon=True)
    process.start()
    async with join() as cluster:
        await until(cluster, num_held=1)
        async with in_task(train_here, cluster, 10) as box:
            await until(cluster, step=9)  # the last one belongs to the other
            await until(cluster, num_wanting=1)
            process.kill()
        process.join()
    assert box.value == 10


@pytest.mark.parametrize(
    ("error", "client", "options", "message"),
    [
        (TypeError, 8786, {}, r"client is 8786; give a distributed\.Client"),
        (ValueError, "", {"name": ""}, "name is ''"),
        (ValueError, "", {"heartbeat_secs": 0}, "heartbeat_secs is 0; give finite seconds > 0"),
        (ValueError, "", {"heartbeat_secs": 9, "lease_secs": 3}, "no shorter than a heartbeat"),
        (ValueError, "", {"timeout_secs": float("inf")}, "timeout_secs is inf"),
        (TypeError, "", {"lease_secs": "30"}, "lease_secs is '30'"),
    ],
)
def test_values_out_of_range_are_named(
    error: type[Exception], client: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=message):
        DaskCluster(client, **options)


@pytest.mark.parametrize(
    "address", [f"tcp://{own_host()}:8786", "nowhere://at all"], ids=["no answer", "malformed"]
)
async def test_an_address_without_an_answer_is_named_in_time(address: str) -> None:
    with pytest.raises(ConnectionError, match=address):
        await DaskCluster(address, timeout_secs=0.5).open()


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, b"\xff" * 64])
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


async def test_a_cluster_opens_once_and_says_how(join: Join) -> None:
    closed = DaskCluster("tcp://127.0.0.1:1")
    for call in (closed.advance, lambda: run_once(closed.session_creator(dict))):
        with pytest.raises(RuntimeError, match="async with DaskCluster"):
            await call()
    async with join() as cluster:
        with pytest.raises(RuntimeError, match="make a new one"):
            await cluster.open()
        with pytest.raises(ValueError, match="step is -1; give an integer >= 0"):
            await cluster.restart(-1)


async def test_a_scheduler_with_another_version_is_named(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: there is no second version to install
    monkeypatch.setattr("asynchooks.distributed._stream.__version__", "99.0")
    with pytest.raises(RuntimeError, match=f"runs asynchooks {__version__}, this process 99.0;"):
        await join().open()


NO_PLUGINS = {"DASK_DISTRIBUTED__SCHEDULER__BLOCKED_HANDLERS": "['register_scheduler_plugin']"}
PRELOAD = {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": "['asynchooks.distributed._dask_plugin']"}


@ONE_BACKEND
async def test_a_scheduler_needs_asynchooks_and_if_it_takes_no_plugins_to_preload_ours() -> None:
    with a_scheduler(before="import sys; sys.modules['asynchooks'] = None") as scheduler:
        message = "No module named 'asynchooks.*Install asynchooks where.*dask scheduler --preload"
        with pytest.raises(RuntimeError, match=message):
            await DaskCluster(scheduler.address).open()
    with a_scheduler(**NO_PLUGINS, **PRELOAD) as scheduler:
        async with DaskCluster(scheduler.address) as cluster:
            assert await cluster.advance() == 1


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "asynchooks.distributed._cluster")
    with pytest.raises(ImportError, match=r"pip install 'asynchooks\[dask\]'"):
        importlib.import_module("asynchooks.distributed._cluster")


@pytest.fixture(scope="module")
def security() -> Any:
    pytest.importorskip("cryptography")  # makes the certificates
    return distributed.Security.temporary()


@pytest.fixture(scope="module")
def tls_address(security: Any) -> Iterator[str]:
    with distributed.LocalCluster(
        n_workers=0,
        security=security,
        protocol="tls://",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    ) as cluster:
        yield cluster.scheduler_address


async def test_certificates_of_the_configuration_or_of_a_client_are_used(
    tls_address: str, security: Any, training: str
) -> None:
    parts = {"ca-file": "ca_file", "client.cert": "client_cert", "client.key": "client_key"}
    configured = {
        f"distributed.comm.tls.{name}": getattr(security, f"tls_{part}")
        for name, part in parts.items()
    }
    with dask.config.set(configured):
        async with DaskCluster(tls_address, training) as cluster:
            assert await train_here(cluster, 10) == cluster.global_step.value == 10
    with Client(tls_address, security=security, set_as_default=False) as client:
        async with DaskCluster(client, training) as cluster:
            assert await train_here(cluster, 20) == 10


@pytest.mark.parametrize(
    ("protocol", "message"),
    [("tls://", "no certificates for .*comm.tls"), ("tcp://", "no Dask scheduler answers at tcp")],
)
async def test_a_connection_without_certificates_is_refused(
    tls_address: str, protocol: str, message: str
) -> None:
    address = tls_address.replace("tls://", protocol)
    with pytest.raises(ConnectionError, match=message):
        await DaskCluster(address, timeout_secs=0.5).open()
