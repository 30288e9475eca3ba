"""TensorFlow servers in processes of their own, which tests start, kill, stop and let go on.

Run as a program it is the launcher: it has TensorFlow loaded already and forks a server for each
line that it reads, so that a server is up after a tenth of a second.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from asynchooks import MonitoredSession

    from .models import Model


class ServerProcess:
    """One address on the loopback device, and the process that serves it now, if any.

    `running_server` makes it, and ends whatever process there is.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._pid: int | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        self.port = port
        self.target = f"grpc://127.0.0.1:{port}"

    def start(self) -> None:
        assert self._pid is None
        self._pid = int(self._launcher.tell(f"start {self.port}"))

    def kill(self) -> None:
        if self._pid is not None:
            assert self._launcher.tell(f"kill {self._pid}") == "dead"
        self._pid = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """Have it fall silent: its connections stay, without answers."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._pid is not None
        os.kill(self._pid, number)


class Launcher:
    """The process that forks servers; they end with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: IO[str] = self._process.stdin
        self._from: IO[str] = self._process.stdout

    def tell(self, line: str) -> str:
        print(line, file=self._to, flush=True)
        return self._from.readline().strip()

    def close(self) -> None:
        self._process.communicate()


def launched() -> Iterator[Launcher]:
    """Fixture: a launcher for all tests; at its end no process is left."""
    launcher = Launcher()
    try:
        yield launcher
    finally:
        launcher.close()


def running_server(launcher: Launcher) -> Iterator[ServerProcess]:
    """Fixture: a server of one test's own."""
    server = ServerProcess(launcher)
    server.start()
    try:
        yield server
    finally:
        server.kill()


class Line(NamedTuple):
    """What was logged, and when, in seconds on the system's clock."""

    text: str
    at: float


@contextmanager
def listening(text: str = "", do: Callable[[], object] | None = None) -> Iterator[list[Line]]:
    """All that asynchooks logs meanwhile; at the first line that holds the text, do something."""
    lines: list[Line] = []
    pending = [do] if do is not None else []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(Line(record.getMessage(), time.monotonic()))
            if pending and text in lines[-1].text:
                pending.pop()()

    logger, listener = logging.getLogger("asynchooks"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def session_of(
    server: ServerProcess, model: Model, hooks: Any = (), *, is_chief: bool, **options: Any
) -> MonitoredSession:
    """A session of the usual kind, which notices soon that its server is silent."""
    from asynchooks import MonitoredTrainingSession

    options = {"heartbeat_secs": 0.5, **options}
    with model.graph.as_default():
        return MonitoredTrainingSession(server.target, is_chief, hooks=hooks, **options)


def serve(port: str, up: int) -> None:
    """Be a server, for ever."""
    import tensorflow as tf

    address = f"127.0.0.1:{port}"
    server = tf.distribute.Server({"local": [address]}, job_name="local", task_index=0)
    os.write(up, b"up")
    server.join()


def fork_server(port: str) -> int | None:
    """The process of a new server; None if it did not come up, which a fork now and then does."""
    told, up = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            serve(port, up)
        finally:
            os._exit(1)
    os.close(up)
    is_told, _, _ = select.select([told], [], [], 3)
    is_up = bool(is_told) and os.read(told, 2) == b"up"
    os.close(told)
    if not is_up:
        end(child)
    return child if is_up else None


def launch() -> None:
    """Do what each line says, until there are no more; then end all servers."""
    import tensorflow

    assert tensorflow
    children = set()
    for line in sys.stdin:
        command, argument = line.split()
        if command == "start":
            child = None
            while child is None:
                child = fork_server(argument)
            children.add(child)
            print(child, flush=True)
        else:
            end(int(argument))
            children.remove(int(argument))
            print("dead", flush=True)
    for child in children:
        end(child)


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


if __name__ == "__main__":
    launch()
