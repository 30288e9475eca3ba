"""Processes of a cluster on loopback, which do what a pipe asks for. It measures nothing."""

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..tf.processes import free_cluster


class ClusterProcess:
    """One task of a cluster in a process of its own; `running_cluster` starts and ends it."""

    def __init__(self, *task: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, their_end = context.Pipe()
        self._process = context.Process(target=_play, args=(their_end, *task), daemon=True)
        self._process.start()
        their_end.close()

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
    tasks = [(job, index) for job, addresses in cluster.items() for index in range(len(addresses))]
    with ExitStack() as stack:
        processes = [ClusterProcess(cluster, *task, workers_per_process) for task in tasks]
        for each in processes:  # they load TensorFlow side by side
            stack.callback(each.kill)
        for each in processes:
            assert each.answer() == "up"
        yield processes
