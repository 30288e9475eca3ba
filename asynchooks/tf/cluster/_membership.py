"""Membership: this process as a member of a server's membership table.

One thread sends requests, another holds the one blocked wait of the process. The operations are
those of `_membership_table`; the `GlobalStep` knows which tasks wait or run steps.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ..._engine.current import system_now
from ..._errors import is_preemption
from ..._step.credits import CreditPolicy
from ..._step.global_step import GlobalStep
from ..._step.source import Demand, SourceState, StepSource
from .._threads import GivenUp, PatientThread, TensorFlowThread
from ._failure_detector import HEARTBEATS_LEASED, FailureDetector, ProcessIds, SilentProcess
from ._membership_client import MembershipClient, Notification, SlotLostError
from ._membership_table import HELD, NEVER, PROCESS_ID, Place

logger = logging.getLogger("asynchooks")

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
"""Between two attempts to reach the table again."""
_LEAST_PATIENCE_SECS = 3.0
"""Before silence is reported: the first run of each kind is compiled, on a busy machine perhaps."""


class Membership(StepSource):
    """Publishes a server's global step to the one of this process, and grants its last steps.

    `_server.Server` creates it with the first session there, and closes it with the last. It has
    threads of its own, to go on while the event loop is busy.

    Args:
        heartbeat_secs: seconds, > 0: two heartbeats are sent in that time, and a server that does
            not answer for so long is reported.
        stride: by how much one run moves the step.
        on_notification: called with each notification; returns whether it is of the newest epoch.
        on_silence: called with an error message when the server does not answer.
    """

    grants_credits = True

    def __init__(
        self,
        step: GlobalStep,
        place: Place,
        master: str,
        config: Any,
        process_ids: ProcessIds,
        heartbeat_secs: float,
        stride: int,
        on_notification: Callable[[Notification], bool],
        on_silence: Callable[[str], None],
    ) -> None:
        self.stride = stride
        self.place = place
        self._step = step
        self._on_notification = on_notification
        self._on_silence = on_silence
        self._heartbeat_secs = heartbeat_secs
        self._process_ids = process_ids
        self._new_client = partial(MembershipClient, place, master, config, process_ids.new())
        self._where = f"the membership table of {place.name} at {place.device or master}"
        self._changed = threading.Condition()
        self._is_due = False  # `look_again` was called
        self._is_closed = False
        self._is_silent = False
        self._has_joined = False  # since the table was lost last: older sessions are lost, too
        self._newest: Notification | None = None  # the newest notification
        self._calls = PatientThread("asynchooks-membership-calls")
        step.feed_from(self, stride)
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
                if pause:
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closed, pause)
                try:
                    self._join_once()
                    pause = _FIRST_PAUSE_SECS
                except (tf.errors.OpError, SlotLostError, RuntimeError) as error:
                    self._set_state(SourceState.LOST, _in_short(error))
                    if is_preemption(error) and self._has_joined and self._is_newest():
                        self._on_silence(f"{self._where} is lost: {_in_short(error)}")
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
        if self._newest is None or notification.epoch >= self._newest.epoch:
            self._newest = notification
        return self._on_notification(notification)

    def _is_newest(self) -> bool:
        """Whether no newer epoch is known: else sessions have been recreated already."""
        return self._newest is None or self._on_notification(self._newest)

    def _restore_held(self, client: MembershipClient) -> int:
        """Return the tickets of an earlier slot; report, and return, the steps still under way."""
        demand = self._step.demand()
        while demand.num_spare and not self._is_closed:
            self._grant(-demand.num_spare, demand)
            demand = self._step.demand()
        held = self.stride * demand.num_out
        if held:
            self._call(client.take, 0, held, self.stride, 0)
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
            reserved = self.stride * (demand.num_out + demand.num_spare)
            if move.ask:
                held = reserved + self.stride * self._ask(
                    client, policy, demand, move.ask, reserved
                )
            elif move.is_idle and held != reserved:
                self._call(client.take, 0, reserved, self.stride, 0)
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

    def _ask(
        self,
        client: MembershipClient,
        policy: CreditPolicy,
        demand: Demand,
        runs: int,
        reserved: int,
    ) -> int:
        """Ask for tickets; returns how many runs are granted."""
        assert demand.limit is not None
        notification, granted = self._call(client.take, runs, reserved, self.stride, demand.limit)
        self._note(notification)
        policy.take_note(granted, demand, system_now())
        if granted:
            self._grant(int(granted), demand)
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
            self._handle_silent(client, each, in_slots)

    def _handle_silent(
        self, client: MembershipClient, silent: SilentProcess, in_slots: np.ndarray
    ) -> None:
        name = self._process_ids.name(silent.process_id)
        if not silent.is_for_long and self._process_ids.may_resume(silent.process_id, in_slots):
            if silent.is_new:
                logger.info(
                    "%s has sent no heartbeat on %s for a while, but has not ended; it keeps the "
                    "%d steps that it has reserved",
                    name, self._where, silent.held,
                )  # fmt: skip
        elif self._call(client.evict, silent.slot, silent.process_id, silent.heartbeats):
            logger.warning(
                "%s has sent no heartbeat on %s for a while; the %d steps that it had reserved "
                "are given to others",
                name, self._where, silent.held,
            )  # fmt: skip

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        def impatient() -> None:
            self._is_silent = True
            problem = f"no answer for {secs:g} s"
            self._set_state(SourceState.LOST, problem)
            if self._has_joined:  # else the session that opens there finds out by itself
                self._on_silence(problem)
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
