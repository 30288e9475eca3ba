"""The processes of a cluster on this machine: their commands, environments and ports.

All listen on 127.0.0.1, but TensorFlow's server listens on all interfaces, without authentication.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

HOST = "127.0.0.1"
LAST_PORT = 65_535


@dataclass(frozen=True)
class Task:
    """One process to be started."""

    name: str
    """The prefix of its lines, such as "worker:1"."""
    command: Sequence[str]
    """The program, an absolute path, and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the launcher's own."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher's own override."""


@dataclass(frozen=True)
class Cluster:
    """All processes of a run."""

    stages: Sequence[Sequence[Task]]
    """In the order in which they end, the reverse of the start. The first trains, others serve."""
    linger_secs: float = 0.0
    """For the other stages to end by themselves when the first has ended."""

    @property
    def tasks(self) -> list[Task]:
        return [task for stage in self.stages for task in stage]


_LINGER_SECS = 5.0
"""A ps ends by itself when its workers have reported their end."""


def tensorflow_cluster(
    script: Sequence[str],
    num_ps: int,
    num_workers: int,
    workers_per_process: int = 1,
    port_base: int | None = None,
) -> Cluster:
    """A process for each ps and each worker; each runs the script, with its task in TF_CONFIG.

    Raises:
        OSError: a port is taken.
        ValueError: there are fewer ports than tasks from `port_base` on.
    """
    sizes = {"ps": num_ps, "worker": num_workers}
    names = {kind: [f"{kind}:{index}" for index in range(size)] for kind, size in sizes.items()}
    free = iter(_addresses([*names["ps"], *names["worker"]], port_base))
    cluster = {kind: [next(free) for _ in each] for kind, each in names.items()}

    def task(kind: str, index: int, name: str) -> Task:
        config = {
            "cluster": cluster,
            "task": {"type": kind, "index": index},
            "workers_per_process": workers_per_process,
        }
        return Task(name, _python(*script), {"TF_CONFIG": json.dumps(config)})

    stages = [
        [task(kind, index, name) for index, name in enumerate(names[kind])]
        for kind in ("worker", "ps")
    ]
    return Cluster(stages, _LINGER_SECS)


def dask_cluster(
    script: Sequence[str],
    num_workers: int,
    workers_per_process: int = 1,
    port_base: int | None = None,
) -> Cluster:
    """A scheduler, workers with so many threads each, and the script once.

    DASK_SCHEDULER_ADDRESS has the scheduler's address, ASYNCHOOKS_NUM_WORKERS their number.

    Raises:
        OSError: the port is taken.
    """
    (address,) = _addresses(["scheduler"], port_base)
    url, port = f"tcp://{address}", address.rpartition(":")[2]
    # without a dashboard there is a web server, by default on all interfaces and port 8787
    common = ("--host", HOST, "--no-dashboard", "--dashboard-address", f"{HOST}:0")
    # else each process writes some thirty lines of routine between those of the script
    quiet = {"DASK_LOGGING__DISTRIBUTED": "warning"}
    scheduler = _python("-m", "distributed.cli.dask_scheduler", "--port", port, *common)
    worker = _python(
        "-m", "distributed.cli.dask_worker", url, "--no-nanny", *common,
        "--nthreads", str(workers_per_process),
    )  # fmt: skip
    workers = [
        Task(f"worker:{index}", [*worker, "--name", str(index)], defaults=quiet)
        for index in range(num_workers)
    ]
    environment = {"DASK_SCHEDULER_ADDRESS": url, "ASYNCHOOKS_NUM_WORKERS": str(num_workers)}
    return Cluster(
        [
            [Task("script", _python(*script), environment)],
            workers,
            [Task("scheduler", scheduler, defaults=quiet)],
        ]
    )


def _python(*arguments: str) -> list[str]:
    # unbuffered: the last lines matter most when the process has died
    return [sys.executable, "-u", *arguments]


def _addresses(names: Sequence[str], base: int | None) -> list[str]:
    """An address that is free at this moment for each task.

    Another program may take one before its task does: no engine accepts an open socket.
    """
    if base is not None and base + len(names) - 1 > LAST_PORT:
        raise ValueError(
            f"--port-base {base} leaves too few ports for {len(names)} tasks; give one "
            f"<= {LAST_PORT + 1 - len(names)}"
        )
    addresses = []
    with ExitStack() as probes:  # all open until the last is found, so that no two are the same
        for index, name in enumerate(names):
            probe = probes.enter_context(socket.socket())
            port = 0 if base is None else base + index
            if port:  # connections of an earlier run in TIME_WAIT do not keep the port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise OSError(
                    f"{name} cannot listen on {HOST}:{port} ({error.strerror}); give another "
                    "--port-base, or leave it out for free ports"
                ) from error
            addresses.append(f"{HOST}:{probe.getsockname()[1]}")
    return addresses
