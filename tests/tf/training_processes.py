"""Processes that play the roles of `training_roles`, and what they print for a test."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .cluster_processes import Cluster, TaskLauncher, TaskProcess
from .training_roles import global_step


class Heard:
    """A process, and all that it has said so far; a thread listens, so that it never blocks."""

    def __init__(self, process: TaskProcess) -> None:
        self.process = process
        self.lines: list[str] = []
        self.heard_at: list[float] = []  # each of them, in seconds on the system's clock
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while line := self.process.line():
            with self._changed:
                self.lines.append(line)
                self.heard_at.append(time.monotonic())
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def hear(self, text: str, secs: float = 60.0, *, after: int = 0) -> str:
        """The first line that begins so, of those after the given number of lines."""
        return self.hear_one(lambda line: line.startswith(text), repr(text), secs, after=after)

    def hear_step(self, step: int, secs: float = 60.0, *, after: int = 0) -> int:
        """The first step that it has said to have made which is not below this one."""

        def is_it(line: str) -> bool:
            return line.startswith("step ") and int(line.split()[1]) >= step

        return int(self.hear_one(is_it, f"step {step}", secs, after=after).split()[1])

    def hear_one(
        self, is_it: Callable[[str], bool], what: str, secs: float, *, after: int = 0
    ) -> str:
        def found() -> str | None:
            return next((line for line in self.lines[after:] if is_it(line)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._is_over, secs)
            line = found()
        assert line, f"{what} was not heard within {secs} s but {self.lines[-60:]}"
        return line

    def done(self, secs: float = 90.0) -> Done:
        """What it has done, once its training has ended."""
        return Done.of(self.hear("done ", secs))

    def ended(self, secs: float = 60.0) -> int:
        """Its exit code, once it has ended by itself."""
        self._thread.join(secs)
        assert not self._thread.is_alive(), f"it has not ended within {secs} s: {self.lines[-60:]}"
        return self.process.code()

    def stop(self) -> None:
        """Have it fall silent: its connections stay."""
        self.process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._thread.is_alive():  # else it has ended, and its number may be another's
            self.process.signal(signal.SIGKILL)
        self._thread.join()
        self.process.kill()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended its training, nor died."""
        return not self._is_over and not any(line.startswith("done ") for line in self.lines)

    def steps(self, epoch: int) -> list[int]:
        """Some of the steps that it has made in an epoch, in order."""
        heard = [line.split()[1:] for line in self.lines if line.startswith("step ")]
        return [int(step) for step, of in heard if int(of) == epoch]

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


class Done(NamedTuple):
    """How a process's training ended: all counts."""

    value: int
    runs: int
    highest: int
    epoch: int

    @classmethod
    def of(cls, line: str) -> Done:
        return cls(*(int(each) for each in line.split()[1:]))


class Cast:
    """The processes of one test. `casting` makes it, and ends them all."""

    def __init__(self, launcher: TaskLauncher, cluster: Cluster, backend: str) -> None:
        self.launcher, self.cluster, self._backend = launcher, cluster, backend
        self._all: list[Heard] = []

    def start(self, role: str, name: str, cluster: Cluster | None = None, **options: Any) -> Heard:
        told = cluster or self.cluster
        process = self.launcher.start(role, told, name, backend=self._backend, **options)
        self._all.append(Heard(process))
        return self._all[-1]

    def end(self) -> None:
        for each in self._all:
            each.kill()

    def story(self) -> str:
        """All that all of them have said, in order."""
        told = [
            (at, each.process.pid, line)
            for each in self._all
            for at, line in zip(each.heard_at, each.lines, strict=False)
        ]
        return "".join(f"{at:.2f} {pid} {line}\n" for at, pid, line in sorted(told))

    def ps(self, cluster: Cluster | None = None) -> Heard:
        """A ps that serves until it is killed."""
        return self.start("holding", "ps:0", cluster)

    def trains(self, name: str, last_step: int, **options: Any) -> Heard:
        return self.start("working", name, last_step=last_step, **options)


def training_launched(tmp_path_factory: Any) -> Iterator[TaskLauncher]:
    """Fixture: a launcher that knows these roles; at its end no process is left."""
    launcher = TaskLauncher(
        tmp_path_factory.mktemp("fifos"),
        [sys.executable, "-m", f"{__package__}.training_roles"],
        Path(__file__).parents[2],
    )
    try:
        yield launcher
    finally:
        launcher.close()


def read_step(cluster: Cluster, scope: str = "") -> int:
    """The global step, as the ps has it."""
    import tensorflow as tf

    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0"):
            step = global_step(scope)
        config = tf.compat.v1.ConfigProto(device_filters=["/job:ps"])
        with tf.compat.v1.Session(f"grpc://{cluster['ps'][0]}", config=config) as session:
            return int(session.run(step))
