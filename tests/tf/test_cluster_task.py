"""One process of a cluster: its server, where ops go, and whether all are of one cluster."""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from collections.abc import Iterator

import anyio
import pytest

import asynchooks.tf
from asynchooks import ClusterError, ClusterTask

from .cluster_processes import TaskLauncher, free_cluster, task_of
from .servers import listening

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens at, on one address of this machine."""
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.listen()
        yield other.getsockname()[1]


def test_sessions_see_the_ps_and_their_own_task_alone() -> None:
    cluster = free_cluster(ps=2, worker=2)
    assert list(task_of(cluster, "worker:1").config.device_filters) == [
        "/job:ps",
        "/job:worker/task:1",
    ]
    assert list(task_of(cluster, "ps:1").config.device_filters) == ["/job:ps"]


def test_variables_and_the_global_step_are_on_the_ps_and_ops_on_the_task() -> None:
    task = task_of(free_cluster(ps=2, worker=2), "worker:1")
    with tf.Graph().as_default(), v1.device(task.device()):
        step = v1.train.get_or_create_global_step()
        weights = [v1.get_variable(name, [3]) for name in "abc"]
        total = tf.add_n(weights)
    assert [each.device for each in (step, *weights)] == [
        f"/job:ps/task:{index}" for index in (0, 1, 0, 1)
    ]
    assert total.device == "/job:worker/task:1"


def test_a_server_is_started_once_and_is_found_by_a_second_object() -> None:
    cluster = free_cluster(ps=1, worker=1)
    task = task_of(cluster, "worker:0")
    task.start()
    task.start()
    assert task.target == task_of(cluster, "worker:0").target == f"grpc://{task.address}"
    alone = v1.ConfigProto(device_filters=["/job:none"])
    with v1.Session(task.target, graph=tf.Graph(), config=alone) as session:
        names = [each.name for each in session.list_devices()]
    assert names[0].startswith("/job:worker/replica:0/task:0/")


def test_one_process_is_not_two_tasks_at_one_address() -> None:
    cluster = free_cluster(ps=1, worker=1)
    task_of(cluster, "worker:0").start()
    other = task_of({**cluster, "chief": ["10.0.0.1:2222"]}, "worker:0")
    with pytest.raises(ClusterError, match="where this process is another task already.*new proc"):
        other.start()


def test_a_taken_port_is_refused_and_the_process_lives(taken: int) -> None:
    for address in (f"127.0.0.1:{taken}", f"127.0.0.2:{taken}"):  # the server listens on all
        task = ClusterTask({"ps": [address], "worker": ["a:1"]}, "ps", 0)
        for _ in range(2):
            message = (
                f"ps:0 is to listen at {address}, where port {taken} is taken: by another ps:0"
            )
            with pytest.raises(ClusterError, match=message):
                task.start()


def test_a_port_that_is_taken_at_the_last_moment_is_refused(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynchooks.tf._cluster_server.check_port", lambda *_: None)
    task = ClusterTask({"ps": [f"127.0.0.1:{taken}"], "worker": ["a:1"]}, "ps", 0)
    with pytest.raises(ClusterError, match="ps:0 at .* did not start: Could not start.*just taken"):
        task.start()


def test_the_port_of_a_killed_server_is_free_at_once(tasks_launcher: TaskLauncher) -> None:
    cluster = free_cluster(ps=1, worker=1)
    ps = tasks_launcher.start("serving", cluster, "ps:0", backend="asyncio")
    with socket.create_connection(("127.0.0.1", int(cluster["ps"][0].split(":")[1]))):
        ps.kill()
        tasks_launcher.start("serving", cluster, "ps:0", backend="asyncio")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("203.0.113.7:2222", "203.0.113.7:2222, an address of another machine; start worker:0 the"),
        ("[2001:db8::7]:2222", "an address of another machine; start worker:0 there"),
        (f"{'x' * 70}:2222", "whose host is not known here: .*; mend the name"),
    ],
)
def test_an_address_where_this_process_cannot_listen_is_refused(address: str, message: str) -> None:
    task = ClusterTask({"ps": ["a:1"], "worker": [address]}, "worker", 0)
    with pytest.raises(ClusterError, match=message):
        task.start()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_on_the_loopback_device_warns_once(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_cluster(ps=1)["ps"][0].split(":")[1]
    task = ClusterTask({"ps": [f"{host}:{port}"], "worker": ["a:1"]}, "ps", 0)
    for _ in range(2):
        task.start()
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(lines) == 1
    assert f"ps:0 is given {host}:{port}, yet TensorFlow's listens on all interfaces" in lines[0]


async def test_a_worker_waits_for_a_ps_that_comes_later(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=2, worker=1)
    waits, checked = anyio.Event(), anyio.Event()

    async def check() -> None:
        await task_of(cluster, "worker:0").check_cluster()
        checked.set()

    tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name)
    with listening("worker:0 waits for ps:1: no server answers", waits.set):
        async with anyio.create_task_group() as group:
            group.start_soon(check)
            await waits.wait()
            assert not checked.is_set()
            tasks_launcher.start("serving", cluster, "ps:1", backend=anyio_backend_name)
    assert checked.is_set()


async def test_a_wait_for_a_ps_ends_in_time_and_can_be_cancelled() -> None:
    cluster = free_cluster(ps=1, worker=1)
    begun = time.monotonic()
    message = r"worker:0 waited for ps:0 for max_wait_secs=0.2 s: no server answers .*is it running"
    with pytest.raises(ClusterError, match=message):
        await task_of(cluster, "worker:0", max_wait_secs=0.2).check_cluster()
    with anyio.move_on_after(0.1) as scope:
        await task_of(cluster, "worker:0").check_cluster()
    assert scope.cancelled_caught
    assert time.monotonic() - begun < 2


async def test_a_silent_ps_is_not_waited_for_longer(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=1, worker=1)
    tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name).signal(
        signal.SIGSTOP
    )
    begun = time.monotonic()
    with pytest.raises(ClusterError, match="has not answered for [13] s; is it running"):
        await task_of(cluster, "worker:0", max_wait_secs=0).check_cluster()
    assert time.monotonic() - begun < 6


async def test_tasks_that_were_told_of_different_clusters_are_refused(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=1, worker=3)
    tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name)
    mine = {**cluster, "chief": cluster["worker"][:1], "worker": cluster["worker"][1:]}
    zero, one, two = cluster["worker"]
    message = (
        f"worker:0 and the process at {cluster['ps'][0]}, which is ps:0, were told of different "
        f"clusters: chief:0 is {zero} here and missing there, worker:0 is {one} here and {zero} "
        f"there, worker:1 is {two} here and {one} there, worker:2 is missing here and {two} there; "
        "give all the same"
    )
    with pytest.raises(ClusterError, match=message):
        async with task_of(mine, "worker:0"):
            pytest.fail("it has begun to train")


async def test_a_server_that_is_no_ps_of_the_cluster_is_refused() -> None:
    cluster = free_cluster(ps=2, worker=1)
    swapped = {**cluster, "ps": cluster["ps"][::-1]}
    task_of(swapped, "ps:0").start()
    task_of(cluster, "ps:0").start()
    with pytest.raises(ClusterError, match="at .*, which is ps:0, were told of different"):
        await task_of(cluster, "worker:0").check_cluster()
    other = free_cluster(ps=1, worker=1)
    tf.distribute.Server(other, job_name="ps", task_index=0)
    with pytest.raises(
        ClusterError, match="has not said which task it is; start it through a Clus"
    ):
        await task_of(other, "worker:0", max_wait_secs=0.1).check_cluster()


async def test_another_process_of_a_server_that_is_told_the_same_is_named() -> None:
    cluster = free_cluster(ps=1, worker=1)
    task = task_of(cluster, "ps:0")
    board = pytest.importorskip("asynchooks.tf._cluster_board")
    notice = '{"task": "worker:0", "cluster": {"ps:0": "%s", "worker:0": "%s"}}'
    board.write_notice(task.target, notice % (cluster["ps"][0], cluster["worker"][0]))
    with pytest.raises(ClusterError, match="worker:0 found worker:0 at .*; start ps:0 there"):
        await task_of(cluster, "worker:0").check_cluster()


async def test_a_server_of_another_version_is_refused() -> None:
    cluster = free_cluster(ps=1, worker=1)
    task = task_of(cluster, "ps:0")
    board = pytest.importorskip("asynchooks.tf._cluster_board")
    told = json.loads(board.read_notice(task.target))
    board.write_notice(task.target, json.dumps({**told, "version": "0.0.1"}))
    with pytest.raises(
        ClusterError, match=rf"ps:0 at {cluster['ps'][0]} runs asynchooks 0\.0\.1, worker:0 \d"
    ):
        await task_of(cluster, "worker:0").check_cluster()


def test_a_second_process_for_one_task_is_refused(tasks_launcher: TaskLauncher) -> None:
    cluster = free_cluster(ps=1, worker=1)
    tasks_launcher.start("serving", cluster, "ps:0", backend="asyncio")
    second = tasks_launcher.start("starting", cluster, "ps:0", backend="asyncio")
    assert "by another ps:0 that still runs, or by another program" in second.line()
    assert second.code() == 0


async def test_a_cluster_trains_and_all_its_processes_end(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=2, chief=1, worker=1)
    names = ["worker:0", "chief:0"]
    workers = [
        tasks_launcher.start("training", cluster, name, backend=anyio_backend_name, last_step=20)
        for name in names
    ]
    servers = [
        tasks_launcher.start("serving", cluster, f"ps:{index}", backend=anyio_backend_name)
        for index in range(2)
    ]
    for worker in workers:
        *_, at, ended = worker.rest().splitlines()
        assert (int(at.removeprefix("at ")) >= 20, ended) == (True, "ended")
    assert [each.line() for each in servers] == ["served", "served"]
    assert [each.code() for each in workers + servers] == [0, 0, 0, 0]


async def test_a_killed_worker_keeps_the_ps_no_longer_than_the_linger_time(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=1, worker=2)
    options = {"backend": anyio_backend_name, "last_step": 10**9}
    ps = tasks_launcher.start(
        "serving", cluster, "ps:0", linger_secs=0.2, backend=anyio_backend_name
    )
    tasks_launcher.start("training", cluster, "worker:0", **options)
    worker = tasks_launcher.start("training", cluster, "worker:1", **options)
    assert worker.line() == "stepped"
    worker.kill()
    await task_of(cluster, "worker:0").end()
    assert (ps.line(), ps.code(), worker.code()) == ("served", 0, -9)


def test_the_names_are_in_the_package() -> None:
    assert asynchooks.ClusterTask is asynchooks.tf.ClusterTask
