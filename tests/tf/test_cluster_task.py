"""One process of a cluster: its arguments, its server, its checks of the others, its end."""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asynchooks.tf
from asynchooks import ClusterError, ClusterTask

from .cluster_processes import TaskLauncher, free_cluster, task_of
from .servers import listening

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


@pytest.mark.faults
def test_sessions_see_the_ps_and_their_own_task_alone() -> None:
    cluster = free_cluster(ps=2, worker=2)
    assert list(task_of(cluster, "worker:1").config.device_filters) == [
        "/job:ps",
        "/job:worker/task:1",
    ]
    assert list(task_of(cluster, "ps:1").config.device_filters) == ["/job:ps"]


@pytest.mark.faults
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


@pytest.mark.faults
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


@pytest.mark.faults
def test_one_process_is_not_two_tasks_at_one_address() -> None:
    cluster = free_cluster(ps=1, worker=1)
    task_of(cluster, "worker:0").start()
    other = task_of({**cluster, "chief": ["10.0.0.1:2222"]}, "worker:0")
    with pytest.raises(ClusterError, match="where this process is another task already.*new proc"):
        other.start()


@pytest.mark.faults
def test_a_taken_port_is_refused_and_the_process_lives(taken: int) -> None:
    for address in (f"127.0.0.1:{taken}", f"127.0.0.2:{taken}"):  # the server listens on all
        task = ClusterTask({"ps": [address], "worker": ["a:1"]}, "ps", 0)
        for _ in range(2):
            message = (
                f"ps:0 is to listen at {address}, where port {taken} is taken: by another ps:0"
            )
            with pytest.raises(ClusterError, match=message):
                task.start()


@pytest.mark.faults
def test_a_port_that_is_taken_at_the_last_moment_is_refused(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynchooks.tf.cluster._own_server._check_port", lambda *_: None)
    task = ClusterTask({"ps": [f"127.0.0.1:{taken}"], "worker": ["a:1"]}, "ps", 0)
    with pytest.raises(ClusterError, match="ps:0 at .* did not start: Could not start.*just taken"):
        task.start()


@pytest.mark.faults
def test_the_port_of_a_killed_server_is_free_at_once(tasks_launcher: TaskLauncher) -> None:
    cluster = free_cluster(ps=1, worker=1)
    ps = tasks_launcher.start("serving", cluster, "ps:0", backend="asyncio")
    with socket.create_connection(("127.0.0.1", int(cluster["ps"][0].split(":")[1]))):
        ps.kill()
        tasks_launcher.start("serving", cluster, "ps:0", backend="asyncio")


@pytest.mark.faults
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


@pytest.mark.faults
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


@pytest.mark.faults
def test_a_second_process_for_one_task_is_refused(tasks_launcher: TaskLauncher) -> None:
    cluster = free_cluster(ps=1, worker=1)
    tasks_launcher.start("serving", cluster, "ps:0", backend="asyncio")
    second = tasks_launcher.start("starting", cluster, "ps:0", backend="asyncio")
    assert "by another ps:0 that still runs, or by another program" in second.line()
    assert second.code() == 0


@pytest.mark.faults
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


@pytest.mark.faults
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


PS, ONE, TWO = "10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"

CLUSTER = {"ps": [PS], "worker": [ONE, TWO]}


def config(**changes: Any) -> str:
    whole = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, **changes}
    return json.dumps({key: value for key, value in whole.items() if value is not None})


def test_tf_config_says_which_task_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", config(workers_per_process=8))
    task = ClusterTask.from_tf_config(max_wait_secs=5)
    assert (task.job, task.index, task.name) == ("worker", 1, "worker:1")
    assert (task.is_ps, task.is_chief) == (False, False)
    assert (task.num_processes, task.workers_per_process, task.max_wait_secs) == (2, 8, 5.0)
    assert task.address == TWO
    assert task.cluster == tf.train.ClusterSpec(CLUSTER)
    assert repr(task) == f"<ClusterTask worker:1 at {TWO}, of 1 ps, 2 worker>"


def test_a_text_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "nonsense")
    task = ClusterTask.from_tf_config(config(task={"type": "ps", "index": 0}))
    assert (task.name, task.is_ps, task.workers_per_process) == ("ps:0", True, 1)


@pytest.mark.parametrize(
    ("cluster", "job", "index", "is_chief"),
    [
        (CLUSTER, "worker", 0, True),
        (CLUSTER, "ps", 0, False),
        ({**CLUSTER, "chief": ["a:1"]}, "chief", 0, True),
        ({**CLUSTER, "chief": ["a:1"]}, "worker", 0, False),
        ({**CLUSTER, "master": ["a:1"]}, "master", 0, True),
        ({**CLUSTER, "evaluator": ["a:1"]}, "evaluator", 0, False),
    ],
)
def test_the_chief_is_chief_or_master_or_else_worker_0(
    cluster: Any, job: str, index: int, is_chief: bool
) -> None:
    assert ClusterTask(cluster, job, index).is_chief is is_chief


def test_ps_and_evaluators_do_not_count_as_processes_that_train() -> None:
    cluster = {**CLUSTER, "chief": ["a:1"], "evaluator": ["b:1"]}
    assert ClusterTask(cluster, "evaluator", 0).num_processes == 3


@pytest.mark.parametrize(
    "cluster",
    [
        tf.train.ClusterSpec(CLUSTER),
        {"ps": {0: PS}, "worker": {1: TWO, 0: ONE}},
        {"worker": (ONE, TWO), "ps": (PS,), "evaluator": []},
    ],
)
def test_a_cluster_is_given_in_several_ways(cluster: Any) -> None:
    assert ClusterTask(cluster, "worker", 1).cluster == tf.train.ClusterSpec(CLUSTER)


def test_in_json_the_indices_of_a_job_may_be_names() -> None:
    sparse = {"ps": {"0": PS}, "worker": {"0": ONE, "12": TWO}}
    task = ClusterTask.from_tf_config(config(cluster=sparse, task={"type": "worker", "index": 12}))
    assert (task.address, task.num_processes) == (TWO, 2)


def test_a_missing_tf_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match=r"TF_CONFIG is not set; give \{\"cluster\".*launch"):
        ClusterTask.from_tf_config()
    with pytest.raises(ValueError, match="TF_CONFIG is empty; give"):
        ClusterTask.from_tf_config("")
    with pytest.raises(TypeError, match="TF_CONFIG is 3; give .*, as text"):
        ClusterTask.from_tf_config(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"TF_CONFIG is '\{', no JSON \(Expecting .*\); give"),
        ("[" * 100_000, r"TF_CONFIG is '\[\[.*\.\.\., no JSON"),
        ("[1]", r"TF_CONFIG is \[1\], no object; give"),
        ("{}", "TF_CONFIG is '{}': it has no 'cluster'; give"),
        (config(task=None), "it has no 'task'; give"),
        (config(cluster=[1]), r"its 'cluster' is \[1\]; give"),
        (config(task="worker"), "its 'task' is 'worker'; give"),
        (config(task={"index": 0}), "the task {'index': 0} without 'type'; give"),
        (config(task={"type": "ps"}), "the task {'type': 'ps'} without 'index'; give"),
        (config(cluster={}), "the cluster is empty; give"),
        (config(task={"type": "boss", "index": 0}), "job is 'boss'; the cluster has ps, worker"),
        (config(task={"type": [], "index": 0}), r"job is \[\]; the cluster has ps, worker"),
        (config(task={"type": "evaluator", "index": 0}), "list the evaluator in the cluster"),
        (config(task={"type": "worker", "index": 2}), "is worker:2; of 'worker' the cluster has 0"),
        (config(task={"type": "worker", "index": -1}), "is worker:-1; of 'worker' the cluster has"),
        (config(workers_per_process=0), "workers_per_process is 0; give an integer >= 1"),
    ],
)
def test_a_tf_config_that_describes_no_task_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterTask.from_tf_config(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (config(task={"type": "worker", "index": "1"}), "in 'worker' is '1'; give an integer"),
        (config(task={"type": "worker", "index": 1.0}), "in 'worker' is 1.0; give an integer"),
        (config(task={"type": "worker", "index": True}), "in 'worker' is True; give an integer"),
        (config(workers_per_process="8"), "workers_per_process is '8'; give an integer >= 1"),
        (config(workers_per_process=True), "workers_per_process is True; give an integer >= 1"),
        (config(cluster={"ps": PS, "worker": [ONE]}), "the job ps is '10.*'; give a list of addr"),
        (config(cluster={"ps": 3, "worker": [ONE]}), "the job ps is 3; give a list of addresses"),
        (config(cluster={"ps": [3], "worker": [ONE]}), 'ps:0 has the address 3; give "host:port"'),
    ],
)
def test_what_is_of_the_wrong_type_is_refused(text: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ClusterTask.from_tf_config(text)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({}, "the cluster is empty; give"),
        ({"ps": [], "worker": []}, "the cluster is empty; give"),
        ({"worker": [ONE]}, "has no ps, but only worker; variables are placed on a ps"),
        ({"ps": [PS]}, "has no chief: neither a chief nor a master nor a worker 0"),
        ({"ps": [PS], "worker": {1: ONE}}, "has no chief"),
        ({"ps": [PS], "evaluator": [ONE]}, "has no chief"),
        ({"ps": [PS], "chief": [ONE], "master": [TWO]}, "2 chiefs: chief:0, master:0; one"),
        ({"ps": [PS], "chief": [ONE, TWO]}, "2 chiefs: chief:0, chief:1; one initialises"),
        ({"ps": [PS], "worker": [ONE, ONE]}, f"worker:0 and worker:1 have the same .*'{ONE}'"),
        ({"ps": ["A:1"], "worker": ["a:1"]}, "ps:0 and worker:0 have the same address 'a:1'"),
        ({"ps": [PS], "boss": [ONE]}, "the job 'boss'; the jobs are ps, chief, master, worker"),
        ({"ps": {1: PS}, "worker": [ONE]}, r"ps has the indices \[1\].*: give \[0\]"),
        ({"ps": {-1: PS}, "worker": [ONE]}, "an index of the job ps is -1; give an integer >= 0"),
    ],
)
def test_a_cluster_that_cannot_train_is_refused(cluster: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterTask(cluster, "worker", 0)


@pytest.mark.parametrize("cluster", [None, 3, "worker", [PS, ONE]])
def test_what_is_no_cluster_is_refused(cluster: Any) -> None:
    with pytest.raises(TypeError, match=r"cluster is .*; give a tf.train.ClusterSpec, or"):
        ClusterTask(cluster, "worker", 0)


def test_an_index_that_is_text_is_refused() -> None:
    with pytest.raises(TypeError, match="an index of the job ps is '0'; give an integer >= 0"):
        ClusterTask({"ps": {"0": PS}, "worker": [ONE]}, "worker", 0)


@pytest.mark.parametrize(
    "address",
    [
        "", "host", "host:", ":2222", "host:0", "host:65536", "host:-1", "host:two", "host:22 22",
        "ho st:2222", "user@host:2222", "host:2222/path", "a:1,b:2", "::1:2222", "[::1]", "[x:2222",
        " host:2222", "host:2222 ", "host:2222\n", "host:2222?x", "host:2222#x",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r'worker:0 has the address .*; give "host:port", as "10'):
        ClusterTask({"ps": [PS], "worker": [address]}, "worker", 0)


def test_an_address_with_its_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ps:0 has the address 'grpc://.*without the protocol"):
        ClusterTask({"ps": [f"grpc://{PS}"], "worker": [ONE]}, "worker", 0)


@pytest.mark.parametrize("address", ["host:1", "a.b-c.example:65535", "127.0.0.1:80", "[::1]:2222"])
def test_host_and_port_are_an_address(address: str) -> None:
    assert ClusterTask({"ps": [PS], "worker": [address]}, "worker", 0).address == address


@pytest.mark.parametrize("secs", [-1, float("nan")])
def test_times_that_are_none_are_refused(secs: float) -> None:
    with pytest.raises(ValueError, match="max_wait_secs is .*; give seconds >= 0"):
        ClusterTask(CLUSTER, "worker", 0, max_wait_secs=secs)
    with pytest.raises(TypeError, match="max_wait_secs is '5'; give seconds >= 0"):
        ClusterTask(CLUSTER, "worker", 0, max_wait_secs="5")  # type: ignore[arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["", "ps", "worker", PS, ONE]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["cluster", "task", "type", "index", "ps", "worker", "0", "x"]), inner
        )
    ),
    max_leaves=8,
)


@given(cluster=JSON, task=JSON, workers=JSON, whole=JSON)
def test_whatever_tf_config_holds_it_is_a_task_or_refused(
    cluster: Any, task: Any, workers: Any, whole: Any
) -> None:
    texts = [
        json.dumps(whole),
        config(cluster=cluster),
        config(task=task),
        config(workers_per_process=workers),
        config(cluster=cluster, task=task),
    ]
    for text in texts:
        try:
            assert ClusterTask.from_tf_config(text).address
        except (TypeError, ValueError) as error:
            assert "give" in str(error) or "the cluster has" in str(error)


@pytest.mark.faults
async def test_a_worker_waits_for_a_ps_that_comes_later(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=2, worker=1)
    waits, checked = anyio.Event(), anyio.Event()

    async def check() -> None:
        await task_of(cluster, "worker:0").check_cluster()
        checked.set()

    tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name)
    with listening("worker:0 waits for ps:1, for", waits.set):
        async with anyio.create_task_group() as group:
            group.start_soon(check)
            await waits.wait()
            assert not checked.is_set()
            tasks_launcher.start("serving", cluster, "ps:1", backend=anyio_backend_name)
    assert checked.is_set()


@pytest.mark.faults
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


@pytest.mark.faults
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


@pytest.mark.faults
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


@pytest.mark.faults
async def test_tasks_that_were_given_different_clusters_are_refused(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=1, worker=3)
    tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name)
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


@pytest.mark.faults
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


@pytest.mark.faults
async def test_a_server_with_the_description_of_another_task_is_named() -> None:
    cluster = free_cluster(ps=1, worker=1)
    task = task_of(cluster, "ps:0")
    messages = pytest.importorskip("asynchooks.tf.cluster._messages")
    text = '{"task": "worker:0", "cluster": {"ps:0": "%s", "worker:0": "%s"}}'
    messages.write_task(task.target, text % (cluster["ps"][0], cluster["worker"][0]))
    with pytest.raises(ClusterError, match="worker:0 found worker:0 at .*; start ps:0 there"):
        await task_of(cluster, "worker:0").check_cluster()


@pytest.mark.faults
async def test_a_server_of_another_version_is_refused() -> None:
    cluster = free_cluster(ps=1, worker=1)
    task = task_of(cluster, "ps:0")
    messages = pytest.importorskip("asynchooks.tf.cluster._messages")
    task_there = json.loads(messages.read_task(task.target))
    messages.write_task(task.target, json.dumps({**task_there, "version": "0.0.1"}))
    with pytest.raises(
        ClusterError, match=rf"ps:0 at {cluster['ps'][0]} runs asynchooks 0\.0\.1, worker:0 \d"
    ):
        await task_of(cluster, "worker:0").check_cluster()
