"""TensorFlow servers outside of a cluster, in processes of their own, and sessions on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .processes import TaskLauncher, TaskProcess, free_cluster

if TYPE_CHECKING:
    from asynchooks import MonitoredSession

    from .models import Model


Creator = TypeVar("Creator")

BEAT = 0.5
"""Heartbeat of sessions, in seconds: silence is noticed within that time."""


class ServerProcess:
    """One address on the loopback device, and the process that serves it now, if any."""

    def __init__(self, launcher: TaskLauncher) -> None:
        self._launcher = launcher
        self._address = free_cluster(local=1)["local"][0]
        self.target = f"grpc://{self._address}"

    def start(self) -> None:
        self._process: TaskProcess = self._launcher.start("alone", address=self._address)

    def restart(self) -> None:
        self._process.kill()
        self.start()

    def stop(self) -> None:
        """Have it fall silent: its connections stay, without answers."""
        self._process.stop()

    def go_on(self) -> None:
        self._process.go_on()


def running_server(launcher: TaskLauncher) -> ServerProcess:
    """Fixture: a server of one test's own."""
    server = ServerProcess(launcher)
    server.start()
    return server


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
    server: ServerProcess, model: Model, *, is_chief: bool, **options: Any
) -> MonitoredSession:
    """A session of the usual kind, which notices soon that its server is silent."""
    from asynchooks import MonitoredTrainingSession

    options = {"heartbeat_secs": BEAT, **options}
    with model.graph.as_default():
        return MonitoredTrainingSession(server.target, is_chief, **options)


chief_of = partial(session_of, is_chief=True)
worker_of = partial(session_of, is_chief=False)


def creator_of(
    kind: Callable[..., Creator], server: ServerProcess, model: Model, **options: Any
) -> Creator:
    """A creator of that kind, whose sessions notice soon that their server is silent."""
    with model.graph.as_default():
        return kind(master=server.target, **{"heartbeat_secs": BEAT, **options})
