"""The tasks of a cluster, as TF_CONFIG or arguments describe them: what is taken and refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import ClusterTask

from .models import tf

PS, ONE, TWO = "10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"

CLUSTER = {"ps": [PS], "worker": [ONE, TWO]}


def config(**changes: Any) -> str:
    whole = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}, **changes}
    return json.dumps({key: value for key, value in whole.items() if value is not None})


def test_tf_config_says_which_task_it_is_and_a_text_goes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_CONFIG", config(workers_per_process=8))
    task = ClusterTask.from_tf_config(max_wait_secs=5)
    assert (task.job, task.index, task.name) == ("worker", 1, "worker:1")
    assert (task.is_ps, task.is_chief) == (False, False)
    assert (task.num_processes, task.workers_per_process, task.max_wait_secs) == (2, 8, 5.0)
    assert task.address == TWO
    assert task.cluster == tf.train.ClusterSpec(CLUSTER)
    assert repr(task) == f"<ClusterTask worker:1 at {TWO}, of 1 ps, 2 worker>"
    task = ClusterTask.from_tf_config(config(task={"type": "ps", "index": 0}))
    assert (task.name, task.is_ps, task.workers_per_process) == ("ps:0", True, 1)


@pytest.mark.parametrize(
    ("more", "job", "is_chief"),
    [
        ({}, "worker", True),
        ({"chief": ["a:1"]}, "chief", True),
        ({"chief": ["a:1"]}, "worker", False),
        ({"master": ["a:1"]}, "master", True),
    ],
)
def test_the_chief_is_chief_or_master_or_else_worker_0(
    more: dict[str, Any], job: str, is_chief: bool
) -> None:
    assert ClusterTask({**CLUSTER, **more}, job, 0).is_chief is is_chief


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
    address = "[::1]:65535"
    assert ClusterTask({"ps": [PS], "worker": [address]}, "worker", 0).address == address


def test_in_json_the_indices_of_a_job_may_be_names() -> None:
    sparse = {"ps": {"0": PS}, "worker": {"0": ONE, "12": TWO}}
    task = ClusterTask.from_tf_config(config(cluster=sparse, task={"type": "worker", "index": 12}))
    assert (task.address, task.num_processes) == (TWO, 2)


def of_task(job: Any, index: Any) -> str:
    return config(task={"type": job, "index": index})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"TF_CONFIG is not set; give \{\"cluster\""),
        ("{", r"TF_CONFIG is '\{', no JSON \(Expecting .*\); give"),
        ("[" * 100_000, r"TF_CONFIG is '\[\[.*\.\.\., no JSON"),
        ("{}", "TF_CONFIG is '{}': it has no 'cluster'; give"),
        (config(task=None), "it has no 'task'; give"),
        (config(cluster=[1]), r"its 'cluster' is \[1\]; give"),
        (config(task={"index": 0}), "without 'type'; give"),
        (of_task("boss", 0), "job is 'boss'; the cluster has ps, work"),
        (of_task("evaluator", 0), "list the evaluator in the cluster"),
        (of_task("worker", 2), "worker:2; of 'worker' the cluster has"),
        (of_task("worker", -1), "worker:-1; of 'worker' the cluster ha"),
        (3, "TF_CONFIG is 3; give .*, as text"),
        (config(workers_per_process=0), "workers_per_process is 0; give an integer >= 1"),
        (config(cluster={"ps": PS, "worker": [ONE]}), "the job ps is '10.*'; give a list of a"),
    ],
)  # fmt: skip
def test_a_tf_config_that_describes_no_task_is_refused(
    text: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises((TypeError, ValueError), match=message):
        ClusterTask.from_tf_config(text)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"ps": [], "worker": []}, "the cluster is empty; give"),
        ({"worker": [ONE]}, "has no ps, but only worker; variables are placed on a ps"),
        ({"ps": [PS], "worker": {1: ONE}}, "has no chief: neither a chief nor a master nor a work"),
        ({"ps": [PS], "chief": [ONE], "master": [TWO]}, "2 chiefs: chief:0, master:0; one"),
        ({"ps": ["A:1"], "worker": ["a:1"]}, "ps:0 and worker:0 have the same address 'a:1'"),
        ({"ps": [PS], "boss": [ONE]}, "the job 'boss'; the jobs are ps, chief, master, worker"),
        ({"ps": {1: PS}, "worker": [ONE]}, r"ps has the indices \[1\].*: give \[0\]"),
        ({"ps": {"0": PS}, "worker": [ONE]}, "an index of the job ps is '0'; give an integer"),
        ({"ps": [f"grpc://{PS}"], "worker": [ONE]}, "'grpc://.*without the protocol"),
        (None, r"cluster is .*; give a tf.train.ClusterSpec, or"),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_train_is_refused(cluster: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ClusterTask(cluster, "worker", 0)


@pytest.mark.parametrize(
    "address",
    [
        "", "host", ":2222", "host:0", "host:65536", "host:two", "ho st:2222", "user@host:2222",
        "host:2222/path", "a:1,b:2", "::1:2222", "host:2222\n",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r'worker:0 has the address .*; give "host:port", as "10'):
        ClusterTask({"ps": [PS], "worker": [address]}, "worker", 0)


@pytest.mark.parametrize("secs", [-1, float("nan"), "5"])
def test_times_that_are_none_are_refused(secs: Any) -> None:
    error = TypeError if secs == "5" else ValueError
    with pytest.raises(error, match="max_wait_secs is .*; give seconds >= 0"):
        ClusterTask(CLUSTER, "worker", 0, max_wait_secs=secs)


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
    for text in (
        json.dumps(whole),
        config(cluster=cluster, task=task),
        config(cluster=cluster),
        config(task=task, workers_per_process=workers),
    ):
        try:
            assert ClusterTask.from_tf_config(text).address
        except (TypeError, ValueError) as error:
            assert "give" in str(error) or "the cluster has" in str(error)
