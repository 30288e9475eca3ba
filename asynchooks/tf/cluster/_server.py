"""One TensorFlow server: what sessions of this process share on it, and their membership there.

`Server` is that state. `Membership` makes this process a member of the server's membership table:
one thread sends requests, another holds the one blocked wait of the process. The operations are
those of `_membership_table`; the `GlobalStep` knows which tasks wait or run steps.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary

import tensorflow as tf

from ..._engine.base import Engine, Slot
from ..._engine.current import system_now
from ..._errors import is_preemption
from ..._step.global_step import GlobalStep
from ..._step.remote import Demand, SourceState, StepSource
from ...distributed._credits import CreditPolicy
from ...distributed._old_objects import OldObjects
from .._threads import GivenUp, PatientThread, TensorFlowThread
from ._failure_detector import HEARTBEATS_LEASED, FailureDetector, ProcessIds
from ._heartbeat import Heartbeat
from ._membership_client import MembershipClient, Notification, SlotLostError
from ._membership_table import HELD, NEVER, PROCESS_ID
from ._notifications import Notifications

logger = logging.getLogger("asynchooks")

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
"""Between two attempts to reach the table again."""
_LEAST_PATIENCE_SECS = 3.0
"""Before silence is reported: the first run of each kind is compiled, on a busy machine perhaps."""


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
                    self, notifications, config, process_ids, heartbeat_secs
                )

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


class Membership(StepSource):
    """Publishes a server's global step to the one of this process, and grants its last steps.

    Its `Server` creates it with the first session there, and closes it with the last. It has
    threads of its own, to go on while the event loop is busy. Two heartbeats are sent in
    `heartbeat_secs`, and a server that does not answer for so long is reported.
    """

    grants_credits = True

    def __init__(
        self,
        server: Server,
        notifications: Notifications,
        config: Any,
        process_ids: ProcessIds,
        heartbeat_secs: float,
    ) -> None:
        place = notifications.place
        self._server, self._step, self._stride = server, server.global_step, notifications.stride
        self._heartbeat_secs = heartbeat_secs
        self._process_ids = process_ids
        self._new_client = partial(
            MembershipClient, place, server.master, config, process_ids.new()
        )
        self._where = f"the membership table of {place.name} at {place.device or server.master}"
        self._changed = threading.Condition()
        self._is_due = False  # `look_again` was called
        self._is_closed = False
        self._is_silent = False
        self._has_joined = False  # since the table was lost last: older sessions are lost, too
        self._epoch = 0  # the newest that the table has sent
        self._calls = PatientThread("asynchooks-membership-calls")
        self._step.feed_from(self, self._stride)
        TensorFlowThread(self._serve, "asynchooks-membership")
        TensorFlowThread.close_at_exit(self)

    def look_again(self) -> None:
        with self._changed:
            self._is_due = True
            self._changed.notify()

    def close(self) -> None:
        """Leave. Returns at once; a call that is under way is left behind."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._is_silent:  # read after `_is_closed` is set; `impatient` reads in the other order
            self._calls.give_up()
        self._step.feed_from(None, instead_of=self)

    def _serve(self) -> None:
        pause = 0.0
        try:
            while not self._is_closed:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, pause)
                try:
                    self._join_once()
                    pause = _FIRST_PAUSE_SECS
                except (tf.errors.OpError, SlotLostError, RuntimeError) as error:
                    self._set_state(SourceState.LOST, _in_short(error))
                    # of an older epoch than the server's, sessions have been recreated already
                    is_newest = self._epoch >= self._server.epoch
                    if is_preemption(error) and self._has_joined and is_newest:
                        self._server.report_silence(f"{self._where} is lost: {_in_short(error)}")
                    self._has_joined = False
                    pause = min(max(2 * pause, _FIRST_PAUSE_SECS), _LONGEST_PAUSE_SECS)
        except GivenUp:
            pass
        finally:
            self._calls.give_up()

    def _join_once(self) -> None:
        """Take a slot and keep it until the slot is lost or `close` is called."""
        if self._is_closed:
            return
        # built before the first request: on a busy machine that alone takes seconds
        client = self._new_client(int(self._heartbeat_secs * 5e5))
        moment = system_now()
        try:
            self._call(client.take_slot)
            held = self._restore_held(client)
            self._lease_from(moment)
            self._has_joined = True
            if not self._note(client.first):
                raise SlotLostError("no chief has initialised the model since the server started")
            client.listen(self._note, self.look_again)
            self._set_state(SourceState.LIVE)
            self._keep_slot(client, held)
        except GivenUp:  # once the server answers, other processes must not wait for this slot
            client.close(leaves=True)
            raise
        finally:
            client.close()

    def _note(self, notification: Notification) -> bool:
        self._epoch = max(self._epoch, notification.epoch)
        return self._server.note(notification)

    def _restore_held(self, client: MembershipClient) -> int:
        """Return the credits of an earlier slot; report, and return, the steps still under way."""
        demand = self._step.demand()
        while demand.num_spare and not self._is_closed:
            self._grant(-demand.num_spare, demand)
            demand = self._step.demand()
        held = self._stride * demand.num_out
        if held:
            self._call(client.take, 0, held, self._stride, 0)
        return held

    def _lease_from(self, moment: float) -> None:
        with self._changed:
            if not self._is_closed:
                self._step.lease(moment + HEARTBEATS_LEASED * self._heartbeat_secs / 2)

    def _keep_slot(self, client: MembershipClient, held: int) -> None:
        policy, detector = CreditPolicy(), FailureDetector(self._heartbeat_secs / 2)
        armed, heartbeat_at = NEVER, system_now()
        while True:
            with self._changed:
                if self._is_closed:
                    break
                self._is_due = False
            if client.error is not None:
                raise client.error
            demand, moment = self._step.demand(), system_now()
            wanted = NEVER if math.isinf(demand.next_step) else int(demand.next_step)
            if wanted != armed:
                self._note(self._call(client.arm, wanted))
                armed = wanted
            move = policy.next_move(demand, moment)
            if move.give_back and self._grant(-move.give_back, demand):
                demand = demand._replace(num_spare=0)
            reserved = self._stride * (demand.num_out + demand.num_spare)
            if move.ask:
                granted = self._ask(client, demand, move.ask, reserved)
                policy.take_note(granted, demand, system_now())
                held = reserved + self._stride * granted
            elif move.is_idle and held != reserved:
                self._call(client.take, 0, reserved, self._stride, 0)
                held = reserved
            if moment >= heartbeat_at:
                self._send_heartbeat(client, detector)
                if detector.have_lasted(demand.num_lost):
                    self._step.forget_lost(demand.epoch)
                heartbeat_at = moment + detector.every_secs
            with self._changed:
                until = 0.0 if move.ask else min(heartbeat_at, move.look_at) - system_now()
                self._changed.wait_for(lambda: self._is_due or self._is_closed, max(0.0, until))
        self._call(client.leave)

    def _ask(self, client: MembershipClient, demand: Demand, runs: int, reserved: int) -> int:
        """Ask for credits for so many runs; returns how many are granted."""
        assert demand.limit is not None
        notification, granted = self._call(client.take, runs, reserved, self._stride, demand.limit)
        self._note(notification)
        if granted:
            self._grant(granted, demand)
        return int(granted)

    def _grant(self, runs: int, demand: Demand) -> bool:
        return self._step.grant(runs, epoch=demand.epoch, limit=demand.limit, source=self)

    def _send_heartbeat(self, client: MembershipClient, detector: FailureDetector) -> None:
        moment = system_now()
        notification, rows = self._call(client.heartbeat)
        self._lease_from(moment)
        self._note(notification)
        in_slots = rows[:, PROCESS_ID]
        own = int(in_slots[client.slot])
        for slot in self._process_ids.others_of_task(own, in_slots):  # their port is this one's
            if self._call(client.evict, slot, int(in_slots[slot]), -1):
                logger.info(
                    "%s has restarted on %s; the %d steps that its predecessor had reserved are "
                    "given to others",
                    self._process_ids.name(own), self._where, int(rows[slot, HELD]),
                )  # fmt: skip
        for each in detector.silent(rows, client.slot):
            name, process_id = self._process_ids.name(each.process_id), each.process_id
            if not each.is_for_long and self._process_ids.may_resume(process_id, in_slots):
                if each.is_new:
                    logger.info(
                        "%s has sent no heartbeat on %s for a while, but has not ended; it keeps "
                        "the %d steps that it has reserved",
                        name, self._where, each.held,
                    )  # fmt: skip
            elif self._call(client.evict, each.slot, process_id, each.heartbeats):
                logger.warning(
                    "%s has sent no heartbeat on %s for a while; the %d steps that it had reserved "
                    "are given to others",
                    name, self._where, each.held,
                )  # fmt: skip

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        def impatient() -> None:
            self._is_silent = True
            problem = f"no answer for {secs:g} s"
            self._set_state(SourceState.LOST, problem)
            if self._has_joined:  # else the session that opens there finds out by itself
                self._server.report_silence(problem)
            if self._is_closed:
                self._calls.give_up()

        secs = max(self._heartbeat_secs, _LEAST_PATIENCE_SECS)
        try:
            result = self._calls.call(partial(fn, *args), secs, impatient)
        finally:
            was_silent, self._is_silent = self._is_silent, False
        if was_silent:
            self._set_state(SourceState.LIVE)
        return result

    def _set_state(self, state: SourceState, reason: str = "") -> None:
        if not self._is_closed:
            why = f"{self._where}: {reason}" if reason else ""
            self._step.set_source_state(state, why, source=self)


def _in_short(error: Exception) -> str:
    text = str(getattr(error, "message", error)).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
