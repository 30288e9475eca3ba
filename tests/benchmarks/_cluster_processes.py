"""Processes of a cluster on loopback, which do what a pipe asks for. It measures nothing."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

TRIES, UP_SECS = 5, 60.0


class ClusterProcess:
    """One task of a cluster in a process of its own; `running_cluster` starts and ends it.

    It is forked from a process that has loaded TensorFlow, but runs nothing.
    """

    def __init__(
        self, cluster: dict[str, list[str]], job: str, index: int, workers_per_process: int
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.benchmarks._cluster_roles"])
        for _ in range(TRIES):
            self._pipe, their_end = context.Pipe()
            args = (their_end, cluster, job, index, workers_per_process)
            self._process = context.Process(target=_play, args=args, daemon=True)
            self._process.start()
            their_end.close()
            # TensorFlow has threads, and a fork of such a process hangs now and then
            if self._pipe.poll(UP_SECS) and self.answer() == "up":
                return
            self.kill()
        raise RuntimeError(f"{job} {index} of the cluster did not come up; stderr says why")

    def begin(self, role: str, **options: Any) -> None:
        """Have it begin to do something."""
        self._pipe.send((role, options))

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
    with ExitStack() as stack:
        sockets = [socket.socket() for _ in range(num_workers + 1)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ps, *workers = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
        for each in sockets:
            each.close()
        cluster = {"ps": [ps], "worker": workers}
        tasks = [("ps", 0), *(("worker", index) for index in range(num_workers))]
        processes = []
        for job, index in tasks:
            process = ClusterProcess(cluster, job, index, workers_per_process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes
