"""One process of a cluster: its server, its checks of the others, and its clean end."""

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

from ..support.threads import threads_left
from .models import tf, v1
from .processes import TaskLauncher, TaskProcess, free_cluster
from .roles import task_of
from .servers import listening

# private: only so can a task describe itself as another one, or warn before 5 s
messages = pytest.importorskip("asynchooks.tf.cluster._messages")
pytestmark = pytest.mark.faults

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


async def test_a_wait_for_a_ps_ends_in_time_with_warnings_now_and_then_and_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asynchooks.tf.cluster._messages._PATIENCE_SECS", 0.3)
    monkeypatch.setattr("asynchooks.tf.cluster._messages._LONGEST_PAUSE_SECS", 0.1)
    cluster = free_cluster(ps=1, worker=1)
    message = r"worker:0 waited for ps:0 for max_wait_secs=1 s: no server answers .*is it running"
    with caplog.at_level(logging.INFO, "asynchooks"), pytest.raises(ClusterError, match=message):
        await task_of(cluster, "worker:0", max_wait_secs=1.0).check_cluster()
    levels = [each.levelno for each in caplog.records if "waits for ps:0" in each.message]
    assert levels[0] == logging.INFO
    assert 1 <= levels.count(logging.WARNING) <= 2, "after 0.3 s and 0.9 s"
    assert "for 1 s more at most: no server answers" in caplog.records[0].message
    with anyio.move_on_after(0.1) as scope:
        await task_of(cluster, "worker:0").check_cluster()
    assert scope.cancelled_caught


async def test_a_silent_ps_is_not_waited_for_longer(start: Start) -> None:
    cluster = free_cluster(ps=1, worker=1)
    start("serving", cluster, "ps:0").stop()
    with pytest.raises(ClusterError, match="has not answered for [13] s; is it running"):
        await task_of(cluster, "worker:0", max_wait_secs=0).check_cluster()


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


async def test_a_ps_serves_until_all_that_train_have_ended_and_no_end_is_lost(
    tasks: dict[str, ClusterTask], caplog: pytest.LogCaptureFixture
) -> None:
    tasks["ps:0"].start()
    for name in ("evaluator:0", "ps:0", "chief:0", "chief:0"):
        await tasks[name].end()
    with anyio.move_on_after(0.3) as scope:
        await tasks["ps:0"].serve(linger_secs=math.inf)
    assert scope.cancelled_caught
    assert threads_left("asynchooks-serve") == [], (
        "a thread in TensorFlow may abort the process's end"
    )
    assert not [each for each in caplog.messages if "is left alone" in each]
    async with anyio.create_task_group() as group:
        group.start_soon(tasks["ps:0"].serve)
        await anyio.wait_all_tasks_blocked()
        await tasks["worker:0"].end()
    await tasks["ps:0"].serve(linger_secs=math.inf)  # it stays over


async def test_once_the_chief_has_ended_the_others_have_the_linger_time(
    tasks: dict[str, ClusterTask], caplog: pytest.LogCaptureFixture
) -> None:
    tasks["ps:0"].start()
    await tasks["chief:0"].end()
    begun = time.monotonic()
    await tasks["ps:0"].serve(linger_secs=0.3)
    assert time.monotonic() - begun >= 0.3
    line = "The chief ended 0.3 s ago, and the end of worker:0 was not reported; ps:0 ends"
    assert line in caplog.messages


async def test_without_the_chiefs_end_a_ps_goes_on(tasks: dict[str, ClusterTask]) -> None:
    tasks["ps:0"].start()
    await tasks["worker:0"].end()
    with anyio.move_on_after(0.3) as scope:
        await tasks["ps:0"].serve(linger_secs=0)
    assert scope.cancelled_caught


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


async def test_a_silent_ps_keeps_neither_the_end_nor_the_other_ps_nor_a_cancellation(
    start: Start,
) -> None:
    cluster = free_cluster(ps=2, worker=1)
    silent, other = (start("serving", cluster, f"ps:{index}") for index in range(2))
    silent.stop()
    task = task_of(cluster, "worker:0")
    await task.end()
    assert (other.ended(), other.lines[-1]) == (0, "served")
    with anyio.move_on_after(0.1) as scope:
        await task_of(cluster, "worker:0").end()
    assert scope.cancelled_caught
    silent.go_on()
    with listening() as lines:
        await task.end()  # once more: to those that do not know it
        assert (silent.ended(), silent.lines[-1]) == (0, "served")
        await task_of(cluster, "worker:0").end()  # both are gone
    said = [line.text.partition(": ")[0] for line in lines if "could not report" in line.text]
    assert sorted(said) == [f"worker:0 could not report its end to ps:{index}" for index in (0, 1)]
