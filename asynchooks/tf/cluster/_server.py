"""One TensorFlow server: what sessions of this process share on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar
from weakref import WeakSet, WeakValueDictionary

from ..._engine.base import Engine, Slot
from ..._step.global_step import GlobalStep
from ...distributed._old_objects import OldObjects
from ._heartbeat import Heartbeat
from ._members import Members
from ._own_server import Servers
from ._publishing import Publishing
from ._spec import Member
from ._table import News

logger = logging.getLogger("asynchooks")


class Server:
    """The state that sessions of this process on one server share: the step, and their chief.

    `Server.at` finds or makes it; it lives as long as a session uses it.
    """

    # One object for each server in the whole process.
    _known: ClassVar[WeakValueDictionary[tuple[str, str], Server]] = WeakValueDictionary()
    _guard = threading.Lock()

    def __init__(self, master: str, step_name: str) -> None:
        self.master = master
        self.member = Member.of(*Servers.cluster_of(master))
        self.ps = Servers.ps_of(master)
        self.global_step = GlobalStep(name=step_name, multi_process=True)
        self._epoch_lock = threading.Lock()
        self.epoch = 0  # of the table; 0: none has begun, or its chief does not use asynchooks
        self._lock = threading.Lock()  # guards what follows
        self._heartbeats: WeakSet[Heartbeat] = WeakSet()  # of the sessions that are open
        self._members: Members | None = None
        self._join: Callable[[str], Members]  # makes one, given why the last one was lost
        self._users: set[object] = set()  # what has joined and not left
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

    def join(
        self,
        user: object,
        heartbeat: Heartbeat,
        publishing: Publishing | None,
        config: object,
        heartbeat_secs: float,
    ) -> None:
        """A session was made: when the server is lost, its runs must fail.

        The steps of other processes are needed until its user has left, if it has a step.
        """
        heartbeat.on_lost = self.lose
        with self._lock:
            self._heartbeats.add(heartbeat)
            if publishing is None:
                return
            if not self._users:
                OldObjects.leave_out()
            self._users.add(user)
            self._join = partial(Members, self, publishing, config, heartbeat_secs)
            if self._members is None:
                self._members = self._join("")

    def leave(self, user: object) -> None:
        """Its last session closes."""
        with self._lock:
            if user not in self._users:
                return
            self._users.remove(user)
            if self._users:
                return
            members, self._members = self._members, None
        OldObjects.take_back()
        if members is not None:
            members.close()

    def lose(self, problem: str, of: Members | None = None) -> None:
        """Have runs on this server raise an error; sessions are recreated then. From any thread.

        Args:
            of: what has noticed it, if another one may have taken its place by now.
        """
        with self._lock:
            if of is not None and of is not self._members:
                return
            heartbeats, self._heartbeats = list(self._heartbeats), WeakSet()
            members = self._members
            # one that has not joined yet waits for the server already
            if members is not None and members.has_joined:
                members.give_up()
                self._members = self._join(problem)
        for each in heartbeats:
            each.report(problem)

    def note(self, news: News, *, begins: bool = False) -> bool:
        """Apply news, from any thread; returns whether they are of the newest known epoch.

        Older ones come from a server that has just started, before its chief has initialised the
        model, or they are late. `begins`: a session begins with them, which has made no run yet.
        """
        with self._epoch_lock:
            if news.epoch < self.epoch:
                return False
            # the first known epoch is the one in which training began, unless the step is behind
            is_known = self.epoch > 0 or (begins and news.step < self.global_step.value)
            is_new, self.epoch = is_known and news.epoch > self.epoch, news.epoch
            before = self.global_step.value
            change = self.global_step.restart if is_new else self.global_step.publish
            change(news.step)
        if is_new and news.step < before:
            logger.warning(
                "%s has gone back from %d to %d: its chief on %s has initialised the model again, "
                "or restored a checkpoint",
                self.global_step.name, before, news.step, self.master,
            )  # fmt: skip
        return True

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
