"""MembershipClient: one process's slot in a membership table, through sessions of its own.

Every method blocks. Nothing is retried here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from .._threads import TensorFlowThread
from ..graph._default_graph import run_in_graph
from ._membership_table import NUM_SLOTS, MembershipTable, Place

v1 = tf.compat.v1


_TAKEN_FOR_DEAD = "other processes have taken this one for dead"


class Notification(NamedTuple):
    """What the table sends: the step, its epoch, and how many slots have been taken so far."""

    step: int
    epoch: int
    num_taken: int

    @classmethod
    def of(cls, values: Any) -> Notification:
        return cls(*[int(each) for each in values[:3]])


class SlotLostError(RuntimeError):
    """Other processes have freed the slot, there is no table yet, or no slot is left."""


class MembershipClient:
    """A slot from `take_slot` until `close`.

    The constructor adds operations and runs none. `every_micros`: microseconds between two
    heartbeats.
    """

    first: Notification
    slot: int

    def __init__(
        self, place: Place, master: str, config: Any, process_id: int, every_micros: int
    ) -> None:
        self._process_id, self._every_micros = process_id, every_micros
        self._graph = tf.Graph()
        self._ops = MembershipTable(self._graph, place)
        self._sessions: list[Any] = []
        self._master, self._config = master, _without_timeout(config)
        with self._graph.as_default():
            self._request = v1.placeholder(tf.int64, (None,), "request")
        self._to_prepare, self._to_join = self._ops.prepare(), self._ops.join(self._request)
        self._to_arm, self._to_take = self._ops.arm(self._request), self._ops.take(self._request)
        self._to_heartbeat = self._ops.heartbeat(self._request)
        self._leave = self._ops.leave(self._request)
        self.error: BaseException | None = None
        self._is_closed = False

    def take_slot(self) -> None:
        """Take a slot; sets `slot`, and `first`, the first notification.

        Raises OpError if the server is lost or the step is not initialised, SlotLostError if all
        slots are taken.
        """
        self._session = self._open()
        try:
            run_in_graph(self._session, self._to_prepare)
            request = [self._process_id, self._every_micros]
            joined = self._ask(self._to_join, request)
            self.first, self.slot = Notification.of(joined), int(joined[3])
            if self.slot < 0:
                raise SlotLostError(f"all {NUM_SLOTS} slots for processes that train are taken")
        except BaseException:
            self.close()
            raise

    def arm(self, threshold: int) -> Notification:
        """Have this process notified when the step reaches the threshold."""
        return Notification.of(self._ask(self._to_arm, [self.slot, threshold]))

    def take(self, wanted: int, held: int, stride: int, limit: int) -> tuple[Notification, int]:
        """Ask for tickets for so many runs, and report the steps that are held here.

        Raises SlotLostError if the slot was freed, as `heartbeat` does.
        """
        request = [self.slot, self._process_id, wanted, held, stride, limit]
        reply = self._ask(self._to_take, request)
        if reply[3] < 0:
            raise SlotLostError(_TAKEN_FOR_DEAD)
        return Notification.of(reply), int(reply[3])

    def heartbeat(self) -> tuple[Notification, np.ndarray]:
        """Count a heartbeat; returns a notification, and the rows of all slots."""
        reply = self._ask(self._to_heartbeat, [self.slot, self._process_id])
        if reply[2 + self.slot][0] != self._process_id:
            raise SlotLostError(_TAKEN_FOR_DEAD)
        return Notification.of(reply[0]), reply[2:]

    def evict(self, slot: int, process_id: int, heartbeats: int) -> bool:
        """Free a dead process's slot; returns whether process and heartbeats were still these."""
        return bool(self._ask(self._leave, [slot, process_id, heartbeats]))

    def leave(self) -> None:
        self.evict(self.slot, self._process_id, -1)

    def listen(
        self, on_notification: Callable[[Notification], object], on_any: Callable[[], None]
    ) -> None:
        """Start the one blocked wait of this process; it ends with `close`, or sets `error`."""
        wait = self._ops.wait(self.slot)

        def serve() -> None:
            try:
                receive = self._open().make_callable(wait)
                while not self._is_closed:
                    on_notification(Notification.of(receive()))
                    on_any()
            except BaseException as error:
                self.error = error
                on_any()

        TensorFlowThread(serve, "asynchooks-membership-wait")

    def close(self, *, leaves: bool = False) -> None:
        """End the blocked wait and the sessions, without waiting for the server.

        With `leaves` the slot is freed first, once the server answers.
        """
        self._is_closed = True
        sessions, self._sessions = self._sessions, []

        def close() -> None:
            if leaves:
                with suppress(Exception):  # it is lost
                    self.leave()
            _close_all(sessions)

        if sessions:
            TensorFlowThread(close, "asynchooks-membership-close")

    def _ask(self, op: Any, request: list[int]) -> Any:
        return run_in_graph(self._session, op, {self._request: request})

    def _open(self) -> Any:
        session = v1.Session(self._master, graph=self._graph, config=self._config)  # may block
        self._sessions.append(session)
        if self._is_closed:  # read after it is among those that `close` closes
            _close_all([session])
            raise SlotLostError("this process has left")
        return session


class ReadyListener:
    """One blocked wait, in a thread, until a chief announces that the model is ready, or `close`.

    `on_ready` is called from the thread then; never if the server is lost.
    """

    def __init__(
        self, place: Place, master: str, config: Any, on_ready: Callable[[], None]
    ) -> None:
        self._place, self._master, self._config = place, master, _without_timeout(config)
        self._on_ready = on_ready
        self._session: Any = None
        self._is_closed = False
        self._guard = threading.Lock()
        TensorFlowThread(self._listen, "asynchooks-ready")

    def close(self) -> None:
        """Free the wait at the server. Does not block."""
        with self._guard:
            self._is_closed = True
            if self._session is not None:
                sessions = [self._session]
                TensorFlowThread(lambda: _close_all(sessions), "asynchooks-ready-close")

    def _listen(self) -> None:
        with tf.Graph().as_default() as graph:
            ready = MembershipTable(graph, self._place).wait_ready()
        session = v1.Session(self._master, graph=graph, config=self._config)  # may block for long
        with self._guard:
            self._session = session
            if self._is_closed:
                _close_all([session])
        with suppress(tf.errors.OpError, RuntimeError):  # lost, or closed
            run_in_graph(self._session, ready)
            self._on_ready()


def _close_all(sessions: list[Any]) -> None:
    for each in sessions:
        with suppress(Exception):  # it is lost already
            each.close()


def _without_timeout(config: Any) -> Any:
    """A copy that lets a wait be as long as it takes."""
    if config is None:
        return None
    copy = v1.ConfigProto()
    copy.CopyFrom(config)
    copy.operation_timeout_in_ms = 0
    return copy
