"""ClusterTask: what one process of a TensorFlow parameter-server cluster is, and its server.

Between-graph replication: each process that trains builds the graph for itself, the variables live
on the ps. It trains nothing, and starts no process but its own server.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import tensorflow as tf

from .._engine import current_engine
from .._errors import is_clean_end
from .._work_thread import run_blocking
from ._cluster_check import check_ps
from ._cluster_end import EndOfTraining, tell_all
from ._cluster_server import Servers
from ._cluster_spec import (
    TRAINING_JOBS,
    check_task,
    checked_count,
    checked_secs,
    checked_tasks,
    chief_of,
    named,
    parse_tf_config,
)

v1 = tf.compat.v1

_GRACE_SECS = 1.0


class ClusterTask:
    """One process of a cluster: its name, its server, where its ops go, and a clean end of all.

    Your script makes it, one in each process. `async with task:` starts the server and waits until
    every ps is there and was told of the same cluster; after a clean end it tells each ps that this
    process has ended, which `serve` waits for. The server itself lives as long as the process:
    TensorFlow cannot stop one.

    TensorFlow's server listens on all interfaces, also when its address is 127.0.0.1, and asks
    nobody who they are: whoever reaches the port can run what they like. Trusted networks only.

    Two processes that both take themselves for one task are found where both run on one machine:
    the second finds its port taken. On two machines they are found unless the host name means, on
    each of them, that machine.

    Args:
        cluster: a `tf.train.ClusterSpec`, or for each job (ps, chief or master, worker, evaluator)
            a list of "host:port", or a dict {index: "host:port"}; the same in every process.
        job: this process's job.
        index: its number in the job.
        workers_per_process: how many workers train in each process, >= 1.
        max_wait_secs: seconds to wait for each ps to be there, >= 0.

    Raises:
        TypeError, ValueError: the cluster is none that can train, or has no such task.

    Example:
        cluster = {"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222"]}
        task = ClusterTask(cluster, "worker", 0)
        with tf.Graph().as_default(), tf.compat.v1.device(task.device()):
            train_op = build_model()
        print(task.name, task.is_chief, train_op.device)
    """

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
        check_task(self._tasks, job, index)
        self.job = job
        self.index = index
        self.name = f"{job}:{index}"
        self.is_ps = job == "ps"
        self.is_chief = self.name == chief_of(self._tasks)
        self.cluster = tf.train.ClusterSpec(self._tasks)
        self.workers_per_process = checked_count(workers_per_process)
        self.max_wait_secs = checked_secs("max_wait_secs", max_wait_secs)
        self._addresses = dict(named(self._tasks))
        trainers = [each for each in self._tasks if each in TRAINING_JOBS]
        self._trainers = {f"{each}:{number}" for each in trainers for number in self._tasks[each]}
        self._told: set[str] = set()  # each ps that knows that this process has ended
        self._end_of_training = EndOfTraining(self.name, self._trainers, chief_of(self._tasks))

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
        config = parse_tf_config(os.environ.get("TF_CONFIG") if text is None else text)
        return cls(
            config.cluster,
            config.job,
            config.index,
            workers_per_process=config.workers_per_process,
            max_wait_secs=max_wait_secs,
        )

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

        So a chief or worker that dies stops nobody else.
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
        """Wait until every ps is there, and see that it was told of the same cluster.

        `async with` does it. Cancellation safe.

        Raises:
            ClusterError: a ps is not there within `max_wait_secs`, is another task, or was told of
                another cluster (says what differs).
        """
        until = current_engine().now() + self.max_wait_secs
        for ps in self._ps_names:
            await check_ps(self.name, ps, self._addresses, self.max_wait_secs, until)

    async def serve(self, *, linger_secs: float = 10.0) -> None:
        """At a ps: serve until training has ended everywhere, as `end` tells.

        It returns when the chief has ended, and every other process that trains has, too, or
        `linger_secs` have passed since: one that was killed never says so. A chief that is killed
        and never comes back keeps it, though, until somebody cancels this.
        Cancellation safe: whoever has ended is remembered, and the server goes on.

        Args:
            linger_secs: seconds to wait for the others once the chief has ended, >= 0.

        Raises:
            RuntimeError: this task is no ps, or is being served already.
            ClusterError: as `start`.
        """
        checked_secs("linger_secs", linger_secs)
        if not self.is_ps:
            raise RuntimeError(f"{self.name} is no ps; train there, within `async with task:`")
        await self._end_of_training.wait(lambda: self.target, linger_secs)

    async def end(self) -> None:
        """Tell each ps that training has ended in this process; elsewhere than there, nothing.

        `async with` does it at a clean end. It ends within some five seconds, whatever the ps does:
        one that is gone, or silent, is logged. Each is told once.
        """
        if self.name in self._trainers:
            untold = [ps for ps in self._ps_names if ps not in self._told]
            targets = {ps: f"grpc://{self._addresses[ps]}" for ps in untold}
            self._told |= await tell_all(self.name, targets)

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

    @property
    def _ps_names(self) -> list[str]:
        return [f"ps:{index}" for index in self._tasks["ps"]]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(tasks)} {job}" for job, tasks in self._tasks.items())
        return f"<ClusterTask {self.name} at {self.address}, of {sizes}>"
