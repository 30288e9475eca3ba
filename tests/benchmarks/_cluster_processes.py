"""Processes of a cluster on loopback, which do what a pipe asks for. It measures nothing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..tf.processes import free_cluster

TRIES, UP_SECS = 5, 60.0


class ClusterProcess:
    """One task of a cluster in a process of its own; `running_cluster` starts and ends it.

    It is forked from a process that has loaded TensorFlow, but runs nothing.
    """

    def __init__(self, *task: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.benchmarks._cluster_roles"])
        for _ in range(TRIES):
            self._pipe, their_end = context.Pipe()
            self._process = context.Process(target=_play, args=(their_end, *task), daemon=True)
            self._process.start()
            their_end.close()
            # TensorFlow has threads, and a fork of such a process hangs now and then
            if self._pipe.poll(UP_SECS) and self.answer() == "up":
                return
            self.kill()
        raise RuntimeError(f"{task} of the cluster did not come up; stderr says why")

    def begin(self, role: str, loop: str = "asyncio", **options: Any) -> None:
        """Have it begin to do something."""
        self._pipe.send((role, loop, options))

    def go_on(self) -> None:
        self._pipe.send(None)

    def answer(self) -> Any:
        """Its next answer.

        Raises:
            EOFError: it has ended; stderr says why.
        """
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _play(*args: Any) -> None:
    from ._cluster_roles import play  # loads TensorFlow, which only those processes need

    play(*args)


@contextmanager
def running_cluster(num_workers: int, workers_per_process: int) -> Iterator[list[ClusterProcess]]:
    """The ps of a cluster, the chief, and the other workers; all end with the block."""
    cluster = free_cluster(ps=1, worker=num_workers)
    with ExitStack() as stack:
        processes = []
        for job, addresses in cluster.items():
            for index in range(len(addresses)):
                processes.append(ClusterProcess(cluster, job, index, workers_per_process))
                stack.callback(processes[-1].kill)
        yield processes
