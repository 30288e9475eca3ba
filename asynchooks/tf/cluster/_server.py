"""One TensorFlow server: whether it answers, and what sessions of this process share on it.

It runs no graph: a run on a server that has fallen silent never returns, whatever its timeout.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.parse import urlsplit
from weakref import WeakSet, WeakValueDictionary

import tensorflow as tf

from ..._engine.base import Engine, Slot
from ..._engine.real_time import OldObjects
from ..._engine.stop import Loss
from ..._step.global_step import GlobalStep
from ._failure_detector import ProcessIds
from ._membership import Membership
from ._membership_client import Notification
from ._notifications import Notifications

logger = logging.getLogger("asynchooks")

# HTTP/2's opening words and an empty SETTINGS frame, which every server answers (RFC 9113, 3.4)
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Server:
    """The state that sessions of this process on one server share: the step, and their chief.

    `Server.at` finds or makes it; it lives as long as a session uses it.
    """

    # One object for each server in the whole process.
    _known: ClassVar[WeakValueDictionary[tuple[str, str], Server]] = WeakValueDictionary()
    _guard = threading.Lock()

    def __init__(self, master: str, step_name: str) -> None:
        self.master = master
        self.global_step = GlobalStep(name=step_name, multi_process=True)
        self._heartbeats: WeakSet[Heartbeat] = WeakSet()  # of the sessions that are open
        self._epoch_lock = threading.Lock()
        self.epoch = 0  # of the table; 0: none has begun, or its chief does not use asynchooks
        self.num_taken = 0  # slots of the table, as of the newest notification
        self._membership: Membership | None = None
        self._num_sessions = 0
        self._lock = threading.Lock()  # guards all fields but the step and the epoch's
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

    def join_membership(
        self,
        notifications: Notifications,
        config: Any,
        process_ids: ProcessIds,
        heartbeat_secs: float,
    ) -> None:
        """A session opens here: notifications of other processes are needed until it has left."""
        with self._lock:
            self._num_sessions += 1
            if self._membership is None:
                OldObjects.leave_out()
                self._membership = Membership(
                    self.global_step, notifications.place, self.master, config, process_ids,
                    heartbeat_secs, notifications.stride, self.note, self.report_silence,
                )  # fmt: skip

    def leave_membership(self) -> None:
        """A session that has joined closes."""
        with self._lock:
            self._num_sessions -= 1
            if self._num_sessions:
                return
            membership, self._membership = self._membership, None
        if membership is not None:
            OldObjects.take_back()
            membership.close()

    def note(self, notification: Notification, *, begins: bool = False) -> bool:
        """Apply a notification, from any thread; returns whether it is of the newest known epoch.

        An older one comes from a server that has just started, before its chief has initialised the
        model, or it is late. `begins`: a session begins with it, which has made no run yet.
        """
        with self._epoch_lock:
            self.num_taken = max(self.num_taken, notification.num_taken)
            if notification.epoch < self.epoch:
                return False
            # the first known epoch is the one in which training began, unless the step is behind
            is_known = self.epoch > 0 or (begins and notification.step < self.global_step.value)
            is_new, self.epoch = is_known and notification.epoch > self.epoch, notification.epoch
            before = self.global_step.value
            if is_new:
                self.global_step.restart(notification.step)
            else:
                self.global_step.publish(notification.step)
        if is_new and notification.step < before:
            logger.warning(
                "%s has gone back from %d to %d: its chief on %s has initialised the model again, "
                "or restored a checkpoint",
                self.global_step.name, before, notification.step, self.master,
            )  # fmt: skip
        return True

    def add_heartbeat(self, heartbeat: Heartbeat) -> None:
        """A session opens whose runs must fail when the server does not answer."""
        with self._lock:
            self._heartbeats.add(heartbeat)

    def report_silence(self, problem: str) -> None:
        """Have runs on this server raise an error, as it does not answer."""
        with self._lock:
            heartbeats = list(self._heartbeats)
        for each in heartbeats:
            each.report(problem)

    def expect_chief(self, chief: object) -> None:
        """A chief's session was created in this process and will be opened, or dropped."""
        with self._lock:
            self._chiefs_to_come.add(chief)

    def note_chief(self, chief: object, *, has_come: bool) -> None:
        """The chief has initialised the model, or is gone; wake the workers that wait for it."""
        with self._lock:
            self._chiefs_to_come.discard(chief)
            self.num_chiefs_come += has_come
            slots, self._slots = self._slots, []
        for slot in slots:
            slot.wake()

    @property
    def has_chief_to_come(self) -> bool:
        """Whether a chief of this process has not opened its session yet."""
        return len(self._chiefs_to_come) > 0

    async def wait_for_chief(self, engine: Engine, num_seen: int, until: float) -> None:
        """Suspend until one more chief than those seen has opened, or until the time."""
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
    """Checks again and again whether a server answers; one that does not is reported as lost.

    One for each TensorFlow session on a server, started and stopped with it. It has a thread, to go
    on while the event loop is busy.

    Args:
        master: the server's address, "grpc://host:port".
        secs: seconds within which silence is noticed, > 0.
        others: further servers that must answer, name -> address.
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
        """Check once, blocking; UnavailableError, with the reason, if a server does not answer."""
        if problem := self._problem():
            raise self._error(problem)

    def report(self, problem: str) -> None:
        """End all waits for the server with an error, as it does not answer."""
        self.loss.report(partial(self._error, problem))

    def start(self) -> None:
        threading.Thread(target=self._beat, name="asynchooks-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(self._timeout):
            problem = self._problem()
            if problem and not self._stopped.is_set():
                logger.warning("%s", problem)
                self.report(problem)
                return

    def _problem(self) -> str:
        """What is wrong with a server; "" if all answer."""
        problems = (self._check_one(*each) for each in self._servers.items())
        return next(filter(None, problems), "")

    def _check_one(self, name: str, target: str) -> str:
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

    @staticmethod
    def _error(problem: str) -> Exception:
        error: Exception = tf.errors.UnavailableError(None, None, problem)
        return error
