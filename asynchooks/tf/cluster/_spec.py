"""The tasks of a TensorFlow cluster, checked: addresses of all processes, and this one's task.

It opens no connection and resolves no name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import tensorflow as tf

from ..._check import integer
from ..._errors import shown

JOBS = ("ps", "chief", "master", "worker", "evaluator")
CHIEF_JOBS = ("chief", "master")
TRAINING_JOBS = (*CHIEF_JOBS, "worker")

Tasks = dict[str, dict[int, str]]
"""job -> index -> "host:port"."""


_EXAMPLE = '{"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}'


def parse_tf_config(text: str | None) -> tuple[Any, Any, Any, Any]:
    """(Cluster, job, index, workers per process) of TF_CONFIG, not checked.

    Raises ValueError if it is missing, no JSON object, or lacks a part.
    """
    right = f'give {{"cluster": {_EXAMPLE}, "task": {{"type": "worker", "index": 0}}}}'
    if text is None or text == "":
        how = "not set" if text is None else "empty"
        raise ValueError(f"TF_CONFIG is {how}; {right}")
    if not isinstance(text, str):
        raise TypeError(f"TF_CONFIG is {shown(text)}; {right}, as text")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"TF_CONFIG is {shown(text)}, no JSON ({error}); {right}") from error
    if not isinstance(config, dict):
        raise ValueError(f"TF_CONFIG is {shown(config)}, no object; {right}")  # noqa: TRY004
    for part, keys in (("cluster", ()), ("task", ("type", "index"))):
        value = config.get(part)
        if not isinstance(value, dict):
            got = f"its {part!r} is {shown(value)}" if part in config else f"it has no {part!r}"
            raise ValueError(f"TF_CONFIG is {shown(text)}: {got}; {right}")  # noqa: TRY004
        for key in keys:
            if key not in value:
                raise ValueError(f"TF_CONFIG has the task {value!r} without {key!r}; {right}")
    cluster = {job: _with_indices(tasks) for job, tasks in config["cluster"].items()}
    task = config["task"]
    return cluster, task["type"], task["index"], config.get("workers_per_process", 1)


def _with_indices(tasks: Any) -> Any:
    """A JSON object has names only: {"0": address} means {0: address}."""
    if not isinstance(tasks, dict) or not all(key.isdecimal() for key in tasks):
        return tasks
    return {int(key): address for key, address in tasks.items()}


def checked_tasks(cluster: Any) -> Tasks:
    """All tasks of a cluster; TypeError or ValueError unless one can train with it."""
    if isinstance(cluster, tf.train.ClusterSpec):
        cluster = cluster.as_dict()
    if not isinstance(cluster, Mapping):
        raise TypeError(
            f"cluster is {shown(cluster)}; give a tf.train.ClusterSpec, or for each job its "
            f"addresses: {_EXAMPLE}"
        )
    tasks = {job: _checked_job(job, cluster[job]) for job in cluster}
    tasks = {job: dict(sorted(tasks[job].items())) for job in JOBS if tasks.get(job)}
    if not tasks:
        raise ValueError(f"the cluster is empty; give for each job its addresses: {_EXAMPLE}")
    if "ps" not in tasks:
        raise ValueError(
            f"the cluster has no ps, but only {', '.join(tasks)}; variables are placed on a ps: "
            f"{_EXAMPLE}"
        )
    chiefs = chiefs_of(tasks)
    if len(chiefs) > 1:
        raise ValueError(
            f"the cluster has {len(chiefs)} chiefs: {', '.join(chiefs)}; one initialises the "
            "model: make the others workers"
        )
    if not chiefs:
        raise ValueError(
            "the cluster has no chief: neither a chief nor a master nor a worker 0; one of them "
            "initialises the model"
        )
    seen: dict[str, str] = {}
    for name, address in named(tasks).items():
        if (other := seen.setdefault(address.lower(), name)) != name:
            raise ValueError(
                f"{other} and {name} have the same address {address!r}; give each task its own"
            )
    return tasks


def _checked_job(job: Any, tasks: Any) -> dict[int, str]:
    if job not in JOBS:
        raise ValueError(f"the cluster has the job {shown(job)}; the jobs are {', '.join(JOBS)}")
    if isinstance(tasks, (str, bytes)) or not isinstance(tasks, (Mapping, Iterable)):
        raise TypeError(
            f"the job {job} is {shown(tasks)}; give a list of addresses, "
            f'{{"{job}": ["10.0.0.1:2222"]}}, or a dict {{index: address}}'
        )
    given = tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
    found = {integer(f"an index of the job {job}", key, least=0): each for key, each in given}
    for index, address in found.items():
        _check_address(f"{job}:{index}", address)
    if job == "ps" and sorted(found) != list(range(len(found))):
        raise ValueError(
            f"the job ps has the indices {sorted(found)}; variables are laid out over all of "
            f"0 to n - 1: give {list(range(len(found)))}"
        )
    return found


def _check_address(name: str, address: Any) -> None:
    """Raise ValueError (TypeError for other types than str) unless it is "host:port"."""
    right = f'{name} has the address {shown(address)}; give "host:port", as "10.0.0.1:2222"'
    if not isinstance(address, str):
        raise TypeError(right)
    if "://" in address:
        raise ValueError(f"{right}, without the protocol")
    try:
        split_address(address)
    except ValueError as error:
        raise ValueError(f"{right} ({error})") from error


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of "host:port", or of "[::1]:port"; ValueError if it is neither."""
    parts = urlsplit(f"//{address}")
    host, port = parts.hostname, parts.port
    if not port:
        raise ValueError("there is no port from 1 to 65535")
    if not host or parts.netloc != address or "@" in address or address.split() != [address]:
        raise ValueError("that is not one host and one port")
    return host, port


def check_task(tasks: Tasks, job: Any, given: Any) -> int:
    """The index; ValueError (TypeError if it is no integer) unless there is this task."""
    if not isinstance(job, str) or job not in tasks:
        hint = "; list the evaluator in the cluster, too, for it to reach the variables"
        raise ValueError(
            f"the task's job is {shown(job)}; the cluster has {', '.join(tasks)}"
            + hint * (job == "evaluator")
        )
    index, there = integer(f"the index of the task in {job!r}", given), tasks[job]
    if index not in there:
        indices = ", ".join(map(str, there)) if len(there) < 10 else f"0 to {max(there)}"
        raise ValueError(f"the task is {job}:{index}; of {job!r} the cluster has {indices}")
    return index


def named(tasks: Tasks, jobs: Iterable[str] = JOBS) -> dict[str, str]:
    """Name -> address of each task of these jobs."""
    return {
        f"{job}:{index}": address for job in jobs for index, address in tasks.get(job, {}).items()
    }


def chiefs_of(tasks: Tasks) -> list[str]:
    """The names of the tasks that initialise the model; in a checked cluster there is one."""
    return list(named(tasks, CHIEF_JOBS)) or ["worker:0"] * (0 in tasks.get("worker", {}))


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Where two clusters, as name -> address, differ, for messages; at most five places."""
    found = [
        f"{name} is {one.get(name, 'missing')} here and {other.get(name, 'missing')} there"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]
    more = [f"and {len(found) - 5} tasks more"] if len(found) > 5 else []
    return ", ".join(found[:5] + more)
