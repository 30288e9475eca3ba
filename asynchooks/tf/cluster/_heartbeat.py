"""Heartbeat: whether a TensorFlow server answers.

It runs no graph: a run on a server that has fallen silent never returns, whatever its timeout.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import urlsplit

import tensorflow as tf

from ..._engine.background import BackgroundThread
from ..._engine.stop import LostPeer

logger = logging.getLogger("asynchooks")

# HTTP/2's opening words and an empty SETTINGS frame, which every server answers (RFC 9113, 3.4)
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Heartbeat:
    """Checks again and again whether a server answers; one that does not is reported as lost.

    One for each TensorFlow session on a server, started and stopped with it. It has a thread, to go
    on while the event loop is busy. Silence is noticed within `secs`; `others`, name -> address,
    are further servers that must answer.
    """

    def __init__(self, master: str, secs: float, others: Mapping[str, str] | None = None) -> None:
        self.lost_peer = LostPeer()
        self.on_lost: Callable[[str], object] = self.report
        """What is called, in the thread, when a server does not answer."""
        self._servers = {"the server": master}
        for name, target in (others or {}).items():
            self._servers[f"the server of {name}"] = target
        self.secs, self._timeout = secs, secs / 2
        self._thread = BackgroundThread("asynchooks-heartbeat", self._watch)
        self.start, self.stop = self._thread.start, self._thread.end

    def check(self) -> None:
        """Check once, blocking; UnavailableError, with the reason, if a server does not answer."""
        if problem := self.problem():
            raise _unavailable(problem)

    def report(self, problem: str) -> None:
        """End all waits for the server with an error, as it does not answer."""
        self.lost_peer.report(partial(_unavailable, problem))

    def _watch(self) -> None:
        while not self._thread.pause(self._timeout):
            problem = self.problem()
            if problem and not self._thread.is_ending:
                logger.warning("%s", problem)
                self.on_lost(problem)
                return

    def problem(self) -> str:
        """What is wrong with a server, "" if all answer; blocks."""
        problems = (self._problem_of(*each) for each in self._servers.items())
        return next(filter(None, problems), "")

    def _problem_of(self, name: str, target: str) -> str:
        try:
            address = urlsplit(target)
            host, port = address.hostname, address.port
        except ValueError:
            host = port = None
        if host is None or port is None:
            return ""  # several addresses, or a form that only TensorFlow knows
        try:
            with socket.create_connection((host, port), self._timeout) as connection:
                connection.settimeout(self._timeout)
                connection.sendall(_HELLO)
                answered = connection.recv(1) != b""
        except TimeoutError:
            return f"{name} at {target} has not answered for {self._timeout:g} s"
        except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
            where = f", where {name} should be" if len(self._servers) > 1 else ""
            return f"no server answers at {target}{where}: {error}"
        return "" if answered else f"{name} at {target} hangs up"


def _unavailable(problem: str) -> Exception:
    error: Exception = tf.errors.UnavailableError(None, None, problem)
    return error
