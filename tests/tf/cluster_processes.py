"""Tasks of a TensorFlow cluster in processes of their own, which tests start, kill and listen to.

Run as a program it is the launcher: it has TensorFlow loaded already and forks a process for each
line that it reads.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynchooks import ClusterTask

Cluster = dict[str, list[str]]
Say = Callable[[str], None]


def free_cluster(**sizes: int) -> Cluster:
    """A cluster on the loopback device, with ports that were free just now."""
    sockets = [socket.socket() for _ in range(sum(sizes.values()))]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return {job: [addresses.pop() for _ in range(num)] for job, num in sizes.items()}


class TaskProcess:
    """A process that plays a role. `TaskLauncher.start` makes it, and ends it at the latest."""

    def __init__(self, launcher: TaskLauncher, pid: int, told: int) -> None:
        self._launcher = launcher
        self.pid = pid
        self._told = os.fdopen(told)
        self._code: int | None = None

    def line(self) -> str:
        """The next line that it says; "" once it has ended."""
        return self._told.readline().strip()

    def rest(self) -> str:
        """All else that it says until it ends, such as its traceback."""
        return self._told.read()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._code is None:
            self.signal(signal.SIGKILL)
        self.code()

    def code(self) -> int:
        """Its exit code, once it has ended; negative is a signal."""
        if self._code is None:
            self._code = int(self._launcher.tell(f"wait {self.pid}"))
            self._told.close()
        return self._code


class TaskLauncher:
    """The process that forks; what it forked ends with each test."""

    def __init__(
        self, directory: Path, command: list[str] | None = None, cwd: Path | None = None
    ) -> None:
        self._directory = directory
        self._process = subprocess.Popen(
            command or [sys.executable, "-P", __file__],
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: IO[str] = self._process.stdin
        self._from: IO[str] = self._process.stdout
        self._children: list[TaskProcess] = []

    def tell(self, line: str) -> str:
        print(line, file=self._to, flush=True)
        return self._from.readline().strip()

    def start(self, role: str, cluster: Cluster, name: str, **options: Any) -> TaskProcess:
        """Have a new process play a role; returns when it says that it is up."""
        while True:
            fifo = self._directory / f"{len(self._children)}"
            os.mkfifo(fifo)
            told = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
            args = {"role": role, "fifo": str(fifo), "cluster": cluster, "name": name, **options}
            child = TaskProcess(self, int(self.tell(f"start {json.dumps(args)}")), told)
            self._children.append(child)
            is_told, _, _ = select.select([told], [], [], 5)
            os.set_blocking(told, True)
            if is_told:
                line = child.line()
                assert line == "up", f"{line}{child.rest()}"
                return child
            child.kill()  # which a fork of a process with threads now and then needs

    def end_all(self) -> None:
        for child in self._children:
            child.kill()

    def close(self) -> None:
        self.end_all()
        self._process.communicate()


def task_of(cluster: Cluster, name: str, **options: Any) -> ClusterTask:
    from asynchooks import ClusterTask

    job, index = name.split(":")
    config = {"cluster": cluster, "task": {"type": job, "index": int(index)}}
    return ClusterTask.from_tf_config(json.dumps(config), **options)


async def serving(say: Say, task: ClusterTask, linger_secs: float = 10.0) -> None:
    """A ps."""
    task.start()
    say("up")
    await task.serve(linger_secs=linger_secs)
    say("served")


async def training(say: Say, task: ClusterTask, last_step: int) -> None:
    """A chief or a worker, which trains."""
    import tensorflow as tf

    from asynchooks import MonitoredTrainingSession, StopAtStepHook

    say("up")
    async with task:
        with tf.Graph().as_default(), tf.compat.v1.device(task.device()):
            step = tf.compat.v1.train.get_or_create_global_step()
            train_op = tf.compat.v1.assign_add(step, 1)
            session = MonitoredTrainingSession(
                task.target,
                task.is_chief,
                config=task.config,
                hooks=[StopAtStepHook(last_step=last_step)],
            )
        async with session:
            await session.run(train_op)
            say("stepped")
            while not session.should_stop():
                await session.run(train_op)
        say(f"at {session.global_step.value}")
    say("ended")


async def starting(say: Say, task: ClusterTask) -> None:
    """A process that only starts the server, and prints the outcome."""
    say("up")
    try:
        task.start()
    except ValueError as error:
        say(f"{type(error).__name__}: {error}")


ROLES = {"serving": serving, "training": training, "starting": starting}


def play(fifo: str, role: str, cluster: Cluster, name: str, backend: str, **options: Any) -> None:
    """What a forked process does with its life."""
    import anyio

    with open(fifo, "w", buffering=1) as told:

        async def main() -> None:
            say = lambda line: print(line, file=told)  # noqa: E731
            await ROLES[role](say, task_of(cluster, name), **options)  # type: ignore[operator]

        try:
            anyio.run(main, backend=backend)
        except BaseException:
            traceback.print_exc(file=told)
            raise


def launch() -> None:
    """Do what each line says, until there are no more."""
    import tensorflow

    import asynchooks.tf

    assert tensorflow
    assert asynchooks.tf
    gc.freeze()  # else each child, at its end, takes a second to look through TensorFlow
    for line in sys.stdin:
        command, argument = line.split(" ", 1)
        if command == "start":
            child = os.fork()
            if child == 0:
                os.close(0)
                play(**json.loads(argument))
                sys.exit(0)  # as a script does: the interpreter's end is part of what is tested
            print(child, flush=True)
        else:
            _, status = os.waitpid(int(argument), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)


def launched(tmp_path_factory: Any) -> Iterator[TaskLauncher]:
    """Fixture: a launcher for all tests of a module; at its end no process is left."""
    launcher = TaskLauncher(tmp_path_factory.mktemp("fifos"))
    try:
        yield launcher
    finally:
        launcher.close()


if __name__ == "__main__":
    launch()
