"""One process of a cluster: its server, its checks of the others, and its clean end."""

from __future__ import annotations

import json
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import anyio
import pytest

from asynchooks import ClusterError, ClusterTask, StopTraining

from .processes import TaskLauncher, TaskProcess, free_cluster
from .roles import task_of
from .servers import NewThreads, listening

tf = pytest.importorskip("tensorflow")
messages = pytest.importorskip("asynchooks.tf.cluster._messages")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow, pytest.mark.faults]

Start = Callable[..., TaskProcess]


@pytest.fixture
def start(launcher: TaskLauncher, anyio_backend_name: str) -> Start:
    """Starts a process of a cluster, with the event loop of the test."""
    return partial(launcher.start, backend=anyio_backend_name)


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
            message = f"to listen at {address}, where port {taken} is taken: by another ps:0"
            with pytest.raises(ClusterError, match=f"ps:0 is {message}"):
                task.start()


def test_a_port_that_is_taken_at_the_last_moment_is_refused(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynchooks.tf.cluster._own_server._check_port", lambda *_: None)
    task = ClusterTask({"ps": [f"127.0.0.1:{taken}"], "worker": ["a:1"]}, "ps", 0)
    with pytest.raises(ClusterError, match="ps:0 at .* did not start: Could not start.*just taken"):
        task.start()


def test_the_port_of_a_killed_server_is_free_at_once(launcher: TaskLauncher) -> None:
    cluster = free_cluster(ps=1, worker=1)
    ps = launcher.start("serving", cluster, "ps:0")
    with socket.create_connection(("127.0.0.1", int(cluster["ps"][0].split(":")[1]))):
        ps.kill()
        launcher.start("serving", cluster, "ps:0")


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


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
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


async def test_a_cluster_trains_and_all_its_processes_end(start: Start) -> None:
    cluster = free_cluster(ps=2, chief=1, worker=1)
    workers = [start("working", cluster, f"{job}:0", last_step=20) for job in ("worker", "chief")]
    servers = [start("serving", cluster, f"ps:{index}") for index in range(2)]
    assert [each.ended() for each in workers + servers] == [0, 0, 0, 0]
    assert [worker.done().value for worker in workers] == [20, 20]
    assert [each.lines[-1] for each in servers] == ["served", "served"]


async def test_a_killed_worker_keeps_the_ps_no_longer_than_the_linger_time(start: Start) -> None:
    cluster = free_cluster(ps=1, worker=2)
    ps = start("serving", cluster, "ps:0", linger_secs=0.2)
    start("working", cluster, "worker:0", last_step=10**9)
    worker = start("working", cluster, "worker:1", last_step=10**9)
    worker.expect("step ")
    assert worker.kill() == -9
    await task_of(cluster, "worker:0").end()
    assert (ps.ended(), ps.lines[-1]) == (0, "served")


async def test_a_worker_waits_for_a_ps_that_comes_later(start: Start) -> None:
    cluster = free_cluster(ps=2, worker=1)
    waits, checked = anyio.Event(), anyio.Event()

    async def check() -> None:
        await task_of(cluster, "worker:0").check_cluster()
        checked.set()

    start("serving", cluster, "ps:0")
    with listening("worker:0 waits for ps:1, for", waits.set):
        async with anyio.create_task_group() as group:
            group.start_soon(check)
            await waits.wait()
            assert not checked.is_set()
            start("serving", cluster, "ps:1")
    assert checked.is_set()


async def test_a_long_wait_for_a_ps_is_warned_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asynchooks.tf.cluster._messages._PATIENCE_SECS", 0.3)
    monkeypatch.setattr("asynchooks.tf.cluster._messages._LONGEST_PAUSE_SECS", 0.1)
    task = task_of(free_cluster(ps=1, worker=1), "worker:0", max_wait_secs=2.0)
    with caplog.at_level(logging.INFO, "asynchooks"), pytest.raises(ClusterError):
        await task.check_cluster()
    levels = [each.levelno for each in caplog.records if "waits for ps:0" in each.message]
    warned = [place for place, level in enumerate(levels) if level == logging.WARNING]
    assert len(warned) == 2, "after 0.3 s and 0.9 s, not yet after 2.7 s"
    assert warned[0] >= 2
    assert "for 2 s more at most: no server answers" in caplog.records[0].message


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


async def test_a_silent_ps_is_not_waited_for_longer(start: Start) -> None:
    cluster = free_cluster(ps=1, worker=1)
    start("serving", cluster, "ps:0").stop()
    begun = time.monotonic()
    with pytest.raises(ClusterError, match="has not answered for [13] s; is it running"):
        await task_of(cluster, "worker:0", max_wait_secs=0).check_cluster()
    assert time.monotonic() - begun < 6


async def test_tasks_that_were_given_different_clusters_are_refused(start: Start) -> None:
    cluster = free_cluster(ps=1, worker=3)
    start("serving", cluster, "ps:0")
    mine = {**cluster, "chief": cluster["worker"][:1], "worker": cluster["worker"][1:]}
    zero, one, two = cluster["worker"]
    message = (
        f"worker:0 and the process at {cluster['ps'][0]}, which is ps:0, were given different "
        f"clusters: chief:0 is {zero} here and missing there, worker:0 is {one} here and {zero} "
        f"there, worker:1 is {two} here and {one} there, worker:2 is missing here and {two} there; "
        "give all processes the same"
    )
    with pytest.raises(ClusterError, match=message):
        async with task_of(mine, "worker:0"):
            pytest.fail("it has begun to train")


async def test_a_server_that_is_no_ps_of_the_cluster_is_refused() -> None:
    cluster = free_cluster(ps=2, worker=1)
    swapped = {**cluster, "ps": cluster["ps"][::-1]}
    task_of(swapped, "ps:0").start()
    task_of(cluster, "ps:0").start()
    with pytest.raises(ClusterError, match="at .*, which is ps:0, were given different"):
        await task_of(cluster, "worker:0").check_cluster()
    other = free_cluster(ps=1, worker=1)
    tf.distribute.Server(other, job_name="ps", task_index=0)
    with pytest.raises(ClusterError, match="does not describe its task; start it through a Clus"):
        await task_of(other, "worker:0", max_wait_secs=0.1).check_cluster()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "worker:0"}, "worker:0 found worker:0 at {}; start ps:0 there"),
        ({"version": "0.0.1"}, r"ps:0 at {} runs asynchooks 0\.0\.1, worker:0 \d"),
    ],
)
async def test_a_server_that_describes_another_task_or_version_is_refused(
    changes: dict[str, str], message: str
) -> None:
    cluster = free_cluster(ps=1, worker=1)
    task = task_of(cluster, "ps:0")
    described = json.loads(messages.read_task(task.target))
    messages.write_task(task.target, json.dumps({**described, **changes}))
    with pytest.raises(ClusterError, match=message.format(cluster["ps"][0])):
        await task_of(cluster, "worker:0").check_cluster()


@pytest.fixture
def tasks() -> dict[str, ClusterTask]:
    """The tasks of a cluster with one ps, which this process serves."""
    cluster = free_cluster(ps=1, chief=1, worker=1, evaluator=1)
    return {name: task_of(cluster, name) for name in ("ps:0", "chief:0", "worker:0", "evaluator:0")}


async def test_a_ps_serves_until_all_that_train_have_ended(
    tasks: dict[str, ClusterTask], threads: NewThreads
) -> None:
    log = []

    async def serve() -> None:
        await tasks["ps:0"].serve(linger_secs=math.inf)
        log.append("served")

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        for name in ("evaluator:0", "ps:0", "chief:0", "chief:0"):
            await tasks[name].end()
            await anyio.sleep(0.02)
            log.append(name)
        await tasks["worker:0"].end()
    assert log == ["evaluator:0", "ps:0", "chief:0", "chief:0", "served"]
    assert threads() == []


async def test_an_end_before_the_ps_serves_is_not_lost(tasks: dict[str, ClusterTask]) -> None:
    tasks["ps:0"].start()
    await tasks["worker:0"].end()
    await tasks["chief:0"].end()
    with anyio.fail_after(5):
        await tasks["ps:0"].serve(linger_secs=math.inf)
        await tasks["ps:0"].serve()  # it stays over


async def test_once_the_chief_has_ended_the_others_have_the_linger_time(
    tasks: dict[str, ClusterTask], caplog: pytest.LogCaptureFixture
) -> None:
    tasks["ps:0"].start()
    await tasks["chief:0"].end()
    begun = time.monotonic()
    await tasks["ps:0"].serve(linger_secs=0.3)
    assert 0.3 <= time.monotonic() - begun < 3
    line = "The chief ended 0.3 s ago, and the end of worker:0 was not reported; ps:0 ends"
    assert line in caplog.messages


async def test_without_the_chiefs_end_a_ps_goes_on(tasks: dict[str, ClusterTask]) -> None:
    tasks["ps:0"].start()
    await tasks["worker:0"].end()
    with anyio.move_on_after(0.3) as scope:
        await tasks["ps:0"].serve(linger_secs=0)
    assert scope.cancelled_caught


async def test_a_cancelled_serve_ends_at_once_and_remembers(
    tasks: dict[str, ClusterTask], threads: NewThreads, caplog: pytest.LogCaptureFixture
) -> None:
    tasks["ps:0"].start()
    await tasks["worker:0"].end()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(tasks["ps:0"].serve)
            while [each.name for each in threads()] != ["asynchooks-serve"]:  # noqa: ASYNC110 - it sets no event
                await anyio.sleep(0.005)
            begun = time.monotonic()
            scope.cancel()
    assert scope.cancelled_caught
    assert time.monotonic() - begun < 0.9
    assert threads() == [], "a thread in TensorFlow may abort the process's end"
    assert not [each for each in caplog.messages if "is left alone" in each]
    await tasks["chief:0"].end()
    with anyio.fail_after(5):
        await tasks["ps:0"].serve(linger_secs=math.inf)


async def test_serving_is_for_a_ps_and_once_at_a_time(tasks: dict[str, ClusterTask]) -> None:
    with pytest.raises(RuntimeError, match="worker:0 is no ps; train there, within `async with ta"):
        await tasks["worker:0"].serve()
    with pytest.raises(ValueError, match="linger_secs is -1; give seconds >= 0"):
        await tasks["ps:0"].serve(linger_secs=-1)
    async with anyio.create_task_group() as group:
        group.start_soon(tasks["ps:0"].serve)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="ps:0 is being served already"):
            await tasks["ps:0"].serve()
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "is_clean"), [(None, True), (StopTraining("enough"), True), (KeyError("x"), False)]
)
async def test_a_block_that_ends_cleanly_reports_its_end_to_the_ps(
    error: Exception | None, is_clean: bool, tasks: dict[str, ClusterTask]
) -> None:
    async with tasks["ps:0"]:
        await tasks["worker:0"].end()
    try:
        async with tasks["chief:0"] as task:
            assert task is tasks["chief:0"]
            if error is not None:
                raise error
    except (StopTraining, KeyError) as raised:
        assert raised is error
    with anyio.move_on_after(10 if is_clean else 0.2) as scope:
        await tasks["ps:0"].serve(linger_secs=math.inf)
    assert scope.cancelled_caught is not is_clean


async def test_the_end_does_not_wait_for_a_ps_that_is_gone(
    tasks: dict[str, ClusterTask], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    begun = time.monotonic()
    await tasks["worker:0"].end()
    assert time.monotonic() - begun < 4
    assert any("worker:0 could not report its end to ps:0: no" in each for each in caplog.messages)


async def test_a_silent_ps_keeps_neither_the_end_nor_the_other_ps(start: Start) -> None:
    cluster = free_cluster(ps=2, worker=1)
    silent, other = (start("serving", cluster, f"ps:{index}") for index in range(2))
    silent.stop()
    begun = time.monotonic()
    task = task_of(cluster, "worker:0")
    await task.end()
    assert time.monotonic() - begun < 4
    assert (other.ended(), other.lines[-1]) == (0, "served")
    silent.go_on()
    await task.end()  # once more: to those that do not know it
    assert (silent.ended(), silent.lines[-1]) == (0, "served")
    with listening() as lines:
        await task.end()
    assert lines == [], "all have it, and no request is sent"


async def test_an_end_is_not_held_by_a_silent_ps_when_it_is_cancelled_or_the_ps_is_killed(
    start: Start,
) -> None:
    cluster = free_cluster(ps=1, worker=1)
    ps = start("serving", cluster, "ps:0")
    ps.stop()
    begun = time.monotonic()
    with anyio.move_on_after(0.1) as scope:
        await task_of(cluster, "worker:0").end()
    assert scope.cancelled_caught
    assert time.monotonic() - begun < 0.9
    begun = time.monotonic()
    async with anyio.create_task_group() as group:
        group.start_soon(task_of(cluster, "worker:0").end)
        await anyio.sleep(0.2)
        ps.kill()
    assert time.monotonic() - begun < 4
