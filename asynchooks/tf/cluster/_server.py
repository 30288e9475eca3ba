"""A TensorFlow server as this process sees it: whether it answers, and what is shared on it.

It runs no graph: a run on a server that has fallen silent never returns, whatever its timeout.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.parse import urlsplit
from weakref import WeakSet, WeakValueDictionary

import tensorflow as tf

from .._engine import Engine, Slot
from .._global_step import GlobalStep
from .._old_objects import OldObjects
from .._stop import Loss
from ._board import Board
from ._board_link import Notice
from ._notices import Notices
from ._owners import Owners

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
        self._heartbeats: WeakSet[Heartbeat] = WeakSet()  # of the sessions that are open
        self._epoch_lock = threading.Lock()
        self._epoch = 0  # of the board; 0: none has begun, or its chief is not one of ours
        self._num_taken = 0
        self._board: Board | None = None
        self._num_on_board = 0
        self._lock = threading.Lock()  # guards what stands above and below, but for the step
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

    def join_board(
        self, notices: Notices, config: Any, owners: Owners, heartbeat_secs: float
    ) -> None:
        """A session opens here: news of other processes is wanted until it has left."""
        with self._lock:
            self._num_on_board += 1
            if self._board is None:
                OldObjects.leave_out()
                self._board = Board(
                    self.global_step, notices.place, self.master, config, owners, heartbeat_secs,
                    notices.stride, self.note, self.report_silence,
                )  # fmt: skip

    def leave_board(self) -> None:
        """A session that has joined closes."""
        with self._lock:
            self._num_on_board -= 1
            board = self._board if self._num_on_board == 0 else None
            if board is not None:
                self._board = None
        if board is not None:
            OldObjects.take_back()
            board.close()

    @property
    def num_taken(self) -> int:
        """How many seats have been taken at the board, as last heard."""
        return self._num_taken

    @property
    def epoch(self) -> int:
        """The newest one that the board has told of, in numbers of its own."""
        return self._epoch

    def note(self, notice: Notice, *, begins: bool = False) -> bool:
        """Take note of what the board said, to whichever thread of this process.

        Args:
            begins: whether a session begins with it: no run of its own is known here yet.

        Returns:
            Whether it is of the newest epoch known: an older one is that of a server that has just
            started, before its chief has initialised the model, or it is late news.
        """
        with self._epoch_lock:
            self._num_taken = max(self._num_taken, notice.num_taken)
            if notice.epoch < self._epoch:
                return False
            # the first one that is heard of is the one in which all began, unless it shows
            is_known = self._epoch > 0 or (begins and notice.step < self.global_step.value)
            is_new, self._epoch = is_known and notice.epoch > self._epoch, notice.epoch
            before = self.global_step.value
            if is_new:
                self.global_step.restart(notice.step)
            else:
                self.global_step.publish(notice.step)
        if is_new and notice.step < before:
            logger.warning(
                "%s has gone back from %d to %d: its chief on %s has initialised the model anew, "
                "or restored a checkpoint",
                self.global_step.name, before, notice.step, self.master,
            )  # fmt: skip
        return True

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        """A session opens that is to hear of the server's silence."""
        with self._lock:
            self._heartbeats.add(heartbeat)

    def report_silence(self, problem: str) -> None:
        """Have what runs here raise an error, as nobody answers."""
        with self._lock:
            heartbeats = list(self._heartbeats)
        for each in heartbeats:
            each.report(problem)

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
        others: further servers that must answer, by their names, as the address of the master.
    """

    def __init__(
        self, master: str, secs: float, others: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.loss = Loss()
        self._servers = {"the server": master}
        self._servers.update({f"the server of {name}": each for name, each in others.items()})
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

    def report(self, problem: str) -> None:
        """Have whatever waits for the server raise an error, as nobody answers."""
        self.loss.report(partial(self._error, problem))

    def start(self) -> None:
        threading.Thread(target=self._beat, name="asynchooks-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._timeout):
            problem = self._ask()
            if problem and not self._stopped.is_set():
                logger.warning("%s", problem)
                self.report(problem)
                return

    def _ask(self) -> str:
        """What is wrong with the servers, nothing if they answer."""
        for name, target in self._servers.items():
            problem = self._ask_one(name, target)
            if problem:
                return problem
        return ""

    def _ask_one(self, name: str, target: str) -> str:
        try:
            address = urlsplit(target)
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
            return f"{name} at {target} has not answered for {self._timeout:g} s"
        except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
            who = f", where {name} should be" if len(self._servers) > 1 else ""
            return f"no server answers at {target}{who}: {error}"
        return "" if answered else f"{name} at {target} hangs up"

    @staticmethod
    def _error(problem: str) -> Exception:
        error: Exception = tf.errors.UnavailableError(None, None, problem)
        return error


def check_heartbeat_secs(secs: float) -> float:
    if isinstance(secs, (int, float)) and 0 < secs < math.inf:
        return float(secs)
    raise ValueError(f"heartbeat_secs is {secs!r}; give seconds > 0")
