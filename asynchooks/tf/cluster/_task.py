"""ClusterTask: one process of a TensorFlow parameter-server cluster, and its server.

Between-graph replication: each process that trains builds the graph for itself, the variables live
on the ps. It trains nothing, and starts no process but its own server.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import tensorflow as tf

from ..._check import integer, number
from ..._engine.base import AsyncOnly
from ..._engine.current import current_engine
from ..._engine.threads import run_blocking
from ..._errors import is_clean_end
from ._messages import EndOfTraining, check_ps, report_end
from ._own_server import Servers
from ._spec import TRAINING_JOBS, check_task, checked_tasks, chiefs_of, named, parse_tf_config

v1 = tf.compat.v1

_GRACE_SECS = 1.0


class ClusterTask(AsyncOnly):
    """One process of a cluster: its name, its server, the devices of its ops, and a clean end.

    Your script creates one in each process. `async with task:` starts the server and waits until
    every ps answers and was given the same cluster; after a clean end it reports the end of this
    process to each ps, which `serve` waits for. The server itself lives as long as the process:
    TensorFlow cannot stop one.

    TensorFlow's server listens on all interfaces, also when its address is 127.0.0.1, and has no
    authentication: any program that reaches the port can run any code. Trusted networks only.

    Two processes of the same task are detected where both run on one machine: the second finds its
    port taken. On two machines they are detected unless the host name means, on each of them, that
    machine.

    Args:
        cluster: a `tf.train.ClusterSpec`, or for each job (ps, chief or master, worker, evaluator)
            a list of "host:port", or a dict {index: "host:port"}; the same in every process.
        job: this process's job.
        index: its number in the job.
        workers_per_process: how many workers train in each process, >= 1.
        max_wait_secs: seconds to wait for each ps to answer, >= 0.

    Raises:
        TypeError, ValueError: the cluster is none that can train, or has no such task.

    Example:
        cluster = {"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"]}
        task = ClusterTask(cluster, "worker", 0)
        with tf.Graph().as_default(), tf.compat.v1.device(task.device()):
            train_op = build_model()
        print(task.name, task.is_chief, train_op.device)
    """

    _in_with = "task"

    def __init__(
        self,
        cluster: Any,
        job: str,
        index: int,
        *,
        workers_per_process: int = 1,
        max_wait_secs: float = 300.0,
    ) -> None:
        self._tasks = checked_tasks(cluster)
        self.job = job
        self.index = check_task(self._tasks, job, index)
        self.name = f"{job}:{self.index}"
        self.is_ps = job == "ps"
        (chief,) = chiefs_of(self._tasks)
        self.is_chief = self.name == chief
        self.cluster = tf.train.ClusterSpec(self._tasks)
        self.workers_per_process = integer("workers_per_process", workers_per_process, least=1)
        self.max_wait_secs = _secs("max_wait_secs", max_wait_secs)
        self._addresses = named(self._tasks)
        self._ps_names = list(named(self._tasks, ["ps"]))
        self._trainers = set(named(self._tasks, TRAINING_JOBS))
        self._reported: set[str] = set()  # each ps that has the end of this process
        self._end_of_training = EndOfTraining(self.name, self._trainers, chief)

    @classmethod
    def from_tf_config(
        cls, text: str | None = None, *, max_wait_secs: float = 300.0
    ) -> ClusterTask:
        """The task that TF_CONFIG describes; beside TensorFlow's keys, "workers_per_process".

        Args:
            text: the JSON text; None takes that of the environment.
            max_wait_secs: as for the class.

        Raises:
            TypeError, ValueError: it is missing, no JSON, or describes no task of a cluster.
        """
        *task, workers = parse_tf_config(os.environ.get("TF_CONFIG") if text is None else text)
        return cls(*task, workers_per_process=workers, max_wait_secs=max_wait_secs)

    @property
    def address(self) -> str:
        """Where this task's server listens: "host:port"."""
        return self._addresses[self.name]

    @property
    def num_processes(self) -> int:
        """How many processes train: all but ps and evaluators."""
        return len(self._trainers)

    @property
    def target(self) -> str:
        """The address for sessions, "grpc://host:port"; starts the server. Raises as `start`."""
        self.start()
        return f"grpc://{self.address}"

    @property
    def config(self) -> Any:
        """A new `tf.compat.v1.ConfigProto`: sessions see the ps and this task, and no others.

        So a chief or worker that dies stops no other process.
        """
        filters = ["/job:ps", f"/job:{self.job}/task:{self.index}"]
        return v1.ConfigProto(device_filters=filters[: 1 if self.is_ps else 2])

    def device(self) -> Any:
        """Where ops go: variables, and the global step, on the ps in turn; others on this task.

        For `tf.compat.v1.device`, or the graph's own; TensorFlow 2's `tf.device` takes no function.
        """
        return v1.train.replica_device_setter(
            cluster=self.cluster, worker_device=f"/job:{self.job}/task:{self.index}"
        )

    def start(self) -> None:
        """Start this task's server, unless it runs; blocks for some ten milliseconds.

        Raises:
            ClusterError: it cannot listen there: the port is taken, or the address is another
                machine's.
        """
        Servers.start(self.name, self._addresses, self.cluster)

    async def check_cluster(self) -> None:
        """Wait until every ps answers, and check that it was given the same cluster.

        `async with` does it. Cancellation safe.

        Raises:
            ClusterError: a ps does not answer within `max_wait_secs`, is another task, or was given
                another cluster (with the differences).
        """
        until = current_engine().now() + self.max_wait_secs
        for ps in self._ps_names:
            await check_ps(self.name, ps, self._addresses, self.max_wait_secs, until)

    async def serve(self, *, linger_secs: float = 10.0) -> None:
        """At a ps: serve until training has ended everywhere, as `end` reports.

        It returns when the chief has ended, and every other process that trains has, too, or
        `linger_secs` have passed since: one that was killed never reports its end. After a chief
        that is killed and not restarted this waits until it is cancelled.
        Cancellation safe: reported ends are kept, and the server goes on.

        Args:
            linger_secs: seconds to wait for the others once the chief has ended, >= 0.

        Raises:
            RuntimeError: this task is no ps, or is being served already.
            ClusterError: as `start`.
        """
        _secs("linger_secs", linger_secs)
        if not self.is_ps:
            raise RuntimeError(f"{self.name} is no ps; train there, within `async with task:`")
        await self._end_of_training.wait(lambda: self.target, linger_secs)

    async def end(self) -> None:
        """Report to each ps that training has ended in this process; does nothing at a ps.

        `async with` does it at a clean end. It ends within some five seconds: a ps that is gone, or
        does not answer, is logged. Each gets one report.
        """
        if self.name in self._trainers:
            missing = set(self._ps_names) - self._reported
            targets = {ps: f"grpc://{self._addresses[ps]}" for ps in sorted(missing)}
            self._reported |= await report_end(self.name, targets)

    async def __aenter__(self) -> ClusterTask:
        engine = current_engine()
        await run_blocking(engine, self.start, _GRACE_SECS, "asynchooks-start")
        if not self.is_ps:
            await self.check_cluster()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if is_clean_end(exc):  # after a failure a supervisor may start the process again
            await self.end()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(tasks)} {job}" for job, tasks in self._tasks.items())
        return f"<ClusterTask {self.name} at {self.address}, of {sizes}>"


def _secs(name: str, value: object) -> float:
    return number(name, value, least=0.0, finite=False, expected="seconds >= 0")
