"""One process of a cluster: its server, where ops go, and its end."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

import asynchooks.tf
from asynchooks import ClusterError, ClusterTask

from .cluster_processes import TaskLauncher, free_cluster, task_of

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port with a listener, on one address of this machine."""
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
    monkeypatch.setattr("asynchooks.tf.cluster._own_server._check_port", lambda *_: None)
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
        (f"{'x' * 70}:2222", "whose host is not known here: .*; correct the name"),
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
    assert f"ps:0 is given {host}:{port}, but TensorFlow's listens on all interfaces" in lines[0]


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
