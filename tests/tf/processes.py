"""Processes that play the roles of `roles`, which tests start, kill, stop and listen to."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from .roles import Cluster, global_step


def free_cluster(**sizes: int) -> Cluster:
    """A cluster on the loopback device, with ports that were free just now."""
    sockets = [socket.socket() for _ in range(sum(sizes.values()))]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return {job: [addresses.pop() for _ in range(num)] for job, num in sizes.items()}


class Done(NamedTuple):
    """How a process's training ended: all counts."""

    value: int
    runs: int
    epoch: int

    @classmethod
    def of(cls, line: str) -> Done:
        return cls(*(int(each) for each in line.split()[1:]))


class TaskProcess:
    """A process that plays a role, and all that it has said so far, which a thread reads.

    `TaskLauncher.start` makes it, and ends it at the latest.
    """

    def __init__(self, launcher: TaskLauncher, pid: int, fifo: int) -> None:
        self._launcher = launcher
        self.pid = pid
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._code: int | None = None
        self._thread = threading.Thread(target=self._listen, args=[fifo], daemon=True)
        self._thread.start()

    def _listen(self, fifo: int) -> None:
        has_begun, _, _ = select.select([fifo], [], [], 5)
        os.set_blocking(fifo, True)
        with os.fdopen(fifo) as pipe:
            for line in pipe if has_begun else []:
                with self._changed:
                    self.lines.append(line.strip())
                    self._launcher.story.append(f"{time.monotonic():.2f} {self.pid} {line}")
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def has_begun(self) -> bool:
        """Wait until it is up; False if it says nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self.lines or self._is_over)
            if self.lines and self.lines[0] != "up":
                self._changed.wait_for(lambda: self._is_over, 5)
                raise AssertionError("\n".join(self.lines))
            return bool(self.lines)

    def expect(self, text: str, secs: float = 60.0, *, after: int = 0) -> str:
        """The first line that begins so, of those after the given number of lines."""
        return self.expect_line(lambda line: line.startswith(text), repr(text), secs, after=after)

    def expect_step(self, step: int, secs: float = 60.0, *, after: int = 0) -> int:
        """The first step that it has said to have made which is not below this one."""

        def is_it(line: str) -> bool:
            return line.startswith("step ") and int(line.split()[1]) >= step

        return int(self.expect_line(is_it, f"step {step}", secs, after=after).split()[1])

    def expect_line(
        self, is_it: Callable[[str], bool], what: str, secs: float, *, after: int = 0
    ) -> str:
        def found() -> str | None:
            return next((line for line in self.lines[after:] if is_it(line)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._is_over, secs)
            line = found()
        assert line, f"{what} was not said within {secs} s but {self.lines[-60:]}"
        return line

    def done(self, secs: float = 90.0, *, after_dones: int = 0) -> Done:
        """What it has done, once its training has ended, behind so many others."""

        def is_it(line: str) -> bool:
            return line.startswith("done ") and len(self._dones()) > after_dones

        self.expect_line(is_it, "the end", secs, after=0)
        return Done.of(self._dones()[after_dones])

    def _dones(self) -> list[str]:
        return [line for line in self.lines if line.startswith("done ")]

    def ended(self, secs: float = 60.0) -> int:
        """Its exit code, once it has ended by itself; negative is a signal."""
        self._thread.join(secs)
        assert not self._thread.is_alive(), f"it has not ended within {secs} s: {self.lines[-60:]}"
        if self._code is None:
            self._code = int(self._launcher.command(f"wait {self.pid}"))
        return self._code

    def stop(self) -> None:
        """Have it fall silent: its connections stay."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> int:
        if self._code is None:  # else it has ended, and its number may be another's
            self.signal(signal.SIGKILL)
        return self.ended()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended its training, nor died."""
        return not self._is_over and not any(line.startswith("done ") for line in self.lines)

    def steps(self, epoch: int) -> list[int]:
        """Some of the steps that it has made in an epoch, in order."""
        lines = [line.split()[1:] for line in self.lines if line.startswith("step ")]
        return [int(step) for step, of in lines if int(of) == epoch]

    @property
    def epoch(self) -> int:
        """That of the last step that it has said."""
        steps = (line for line in reversed(self.lines) if line.startswith("step "))
        return int(next(steps, "step 0 0").split()[2])

    @property
    def started(self) -> dict[int, int]:
        """Worker -> the step that it found at its first run."""
        pairs = [line.split()[1:] for line in self.lines if line.startswith("started ")]
        return {int(worker): int(step) for worker, step in pairs}


class TaskLauncher:
    """The process that forks; what it forked ends with each test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.roles"],
            cwd=Path(__file__).parents[2],
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
        self.story: list[str] = []  # all that all of them have said, and when

    def command(self, line: str) -> str:
        print(line, file=self._to, flush=True)
        return self._from.readline().strip()

    def start(
        self,
        role: str,
        cluster: Cluster | None = None,
        name: str = "",
        backend: str = "asyncio",
        **options: Any,
    ) -> TaskProcess:
        """Have a new process play a role; returns when it says that it is up."""
        task = None if cluster is None else (cluster, name)
        while True:
            fifo = self._directory / f"{len(self._children)}"
            os.mkfifo(fifo)
            end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
            args = {"role": role, "fifo": str(fifo), "backend": backend, "task": task, **options}
            child = TaskProcess(self, int(self.command(f"start {json.dumps(args)}")), end)
            self._children.append(child)
            if child.has_begun():
                return child
            child.kill()  # which a fork of a process with threads now and then needs

    def end_all(self) -> None:
        for child in self._children:
            child.kill()

    def close(self) -> None:
        self.end_all()
        self._process.communicate()


def launched(tmp_path_factory: Any) -> Iterator[TaskLauncher]:
    """Fixture: a launcher for all tests, as TensorFlow takes seconds to load."""
    launcher = TaskLauncher(tmp_path_factory.mktemp("fifos"))
    try:
        yield launcher
    finally:
        launcher.close()


class RunningCluster:
    """The processes of one test, which train on one cluster."""

    def __init__(self, launcher: TaskLauncher, addresses: Cluster, backend: str) -> None:
        self._launcher, self.addresses, self._backend = launcher, addresses, backend

    def start(
        self, role: str, name: str, cluster: Cluster | None = None, **options: Any
    ) -> TaskProcess:
        return self._launcher.start(role, cluster or self.addresses, name, self._backend, **options)

    def ps(self, cluster: Cluster | None = None) -> TaskProcess:
        """A ps that serves until it is killed."""
        return self.start("holding", "ps:0", cluster)

    def trains(self, name: str, last_step: int, **options: Any) -> TaskProcess:
        return self.start("working", name, last_step=last_step, **options)


def read_step(cluster: Cluster, scope: str = "") -> int:
    """The global step, as the ps has it."""
    import tensorflow as tf

    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            step = global_step(scope)
        config = tf.compat.v1.ConfigProto(device_filters=["/job:ps"])
        with tf.compat.v1.Session(f"grpc://{cluster['ps'][0]}", config=config) as session:
            return int(session.run(step))
