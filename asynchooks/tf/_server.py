"""A TensorFlow server as this process sees it: whether it answers, and what is shared on it.

It runs no graph: a run on a server that has fallen silent never returns, whatever its timeout.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from functools import partial
from typing import ClassVar
from urllib.parse import urlsplit
from weakref import WeakSet, WeakValueDictionary

import tensorflow as tf

from .._engine import Engine, Slot
from .._global_step import GlobalStep
from .._stop import Loss

logger = logging.getLogger("asynchooks")

# HTTP/2's opening words and an empty SETTINGS frame, which every server answers (RFC 9113, 3.4)
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Server:
    """What all sessions of this process on one server share: the step, and news of the chief.

    `Server.at` finds or makes it; it lives as long as a session uses it.
    """

    # What the process knows of a server is one thing, wherever in it somebody asks.
    _known: ClassVar[WeakValueDictionary[tuple[str, str], Server]] = WeakValueDictionary()
    _guard = threading.Lock()

    def __init__(self, master: str, step_name: str) -> None:
        self.master = master
        self.global_step = GlobalStep(name=step_name, moved_elsewhere=True)
        self.last_look = -math.inf  # when one of the sessions has read the step for all
        self._lock = threading.Lock()  # guards the next three
        self._slots: list[Slot] = []
        self._chiefs_to_come: WeakSet[object] = WeakSet()
        self.num_chiefs_come = 0

    @classmethod
    def at(cls, master: str, step_name: str) -> Server | None:
        """The server at this address; None for sessions in the process itself."""
        if not master.startswith("grpc://"):
            return None
        with cls._guard:
            server = cls._known.get((master, step_name))
            if server is None:
                server = cls._known[master, step_name] = cls(master, step_name)
            return server

    def expect_chief(self, chief: object) -> None:
        """A chief's session was made in this process and will be opened, or dropped."""
        with self._lock:
            self._chiefs_to_come.add(chief)

    def note_chief(self, chief: object, *, has_come: bool) -> None:
        """The chief has initialised the model, or is gone; tell those who wait for it."""
        with self._lock:
            self._chiefs_to_come.discard(chief)
            self.num_chiefs_come += has_come
            slots, self._slots = self._slots, []
        for slot in slots:
            slot.wake()

    @property
    def has_chief_to_come(self) -> bool:
        """Whether a chief of this process will tell when it has come."""
        return len(self._chiefs_to_come) > 0

    async def wait_for_chief(self, engine: Engine, num_seen: int, until: float) -> None:
        """Suspend until another chief than those seen has come, or the time has."""
        slot = Slot(engine, f"a chief on {self.master}")
        with self._lock:
            if self.num_chiefs_come > num_seen:
                return
            self._slots.append(slot)
        try:
            await engine.park(slot, until)
        finally:
            with self._lock:
                if slot in self._slots:
                    self._slots.remove(slot)


class Heartbeat:
    """Asks a server again and again whether it answers; reports its silence as a loss.

    One for each TensorFlow session on a server; whoever opens that starts and stops it. A thread,
    because it must go on while the event loop is busy.

    Args:
        master: the server's address, "grpc://host:port".
        secs: seconds within which silence is noticed, > 0.
    """

    def __init__(self, master: str, secs: float) -> None:
        self.loss = Loss()
        self._master = master
        self._timeout = secs / 2
        self._stopped = threading.Event()

    def check(self) -> None:
        """Ask once, blocking.

        Raises:
            tf.errors.UnavailableError: nobody answers (says how).
        """
        problem = self._ask()
        if problem:
            raise self._error(problem)

    def start(self) -> None:
        threading.Thread(target=self._beat, name="asynchooks-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._timeout):
            problem = self._ask()
            if problem and not self._stopped.is_set():
                logger.warning("%s", problem)
                self.loss.report(partial(self._error, problem))
                return

    def _ask(self) -> str:
        """What is wrong with the server, nothing if it answers."""
        try:
            address = urlsplit(self._master)
            host, port = address.hostname, address.port
        except ValueError:
            return ""  # several addresses, or a form that only TensorFlow knows
        if host is None or port is None:
            return ""
        try:
            with socket.create_connection((host, port), self._timeout) as connection:
                connection.settimeout(self._timeout)
                connection.sendall(_HELLO)
                answered = connection.recv(1) != b""
        except TimeoutError:
            return f"the server at {self._master} has not answered for {self._timeout:g} s"
        except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
            return f"no server answers at {self._master}: {error}"
        return "" if answered else f"the server at {self._master} hangs up"

    @staticmethod
    def _error(problem: str) -> Exception:
        error: Exception = tf.errors.UnavailableError(None, None, problem)
        return error


def check_heartbeat_secs(secs: float) -> float:
    if isinstance(secs, (int, float)) and 0 < secs < math.inf:
        return float(secs)
    raise ValueError(f"heartbeat_secs is {secs!r}; give seconds > 0")
