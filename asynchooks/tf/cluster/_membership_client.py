"""MembershipClient: one process's slot in a membership table, through sessions of its own.

Every method blocks. Nothing is retried here.
"""

from __future__ import annotations

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


class _Sessions:
    """Sessions on a server whose waits may take any time, until `close`, from any thread."""

    def __init__(self, master: str, config: Any) -> None:
        self._master, self._config = master, config
        if config is not None:
            self._config = v1.ConfigProto()
            self._config.CopyFrom(config)
            self._config.operation_timeout_in_ms = 0
        self._sessions: list[Any] = []
        self.is_closed = False

    def open(self, graph: tf.Graph) -> Any:
        session = v1.Session(self._master, graph=graph, config=self._config)  # may block
        self._sessions.append(session)
        if self.is_closed:  # read after it is among those that `close` closes
            with suppress(Exception):  # it is closed, or lost, already
                session.close()
            raise SlotLostError("this process has left")
        return session

    def close(self, *first: Callable[[], object]) -> None:
        """Call `first`, then close the sessions; does not wait for the server."""
        self.is_closed = True
        sessions, self._sessions = self._sessions, []

        def close() -> None:
            for call in (*first, *(each.close for each in sessions)):
                with suppress(Exception):  # it is lost
                    call()

        if sessions:
            TensorFlowThread(close, "asynchooks-membership-close")


class MembershipClient:
    """A slot from `take_slot` until `close`; `every_micros` are between two heartbeats.

    The constructor adds operations and runs none.
    """

    first: Notification
    slot: int

    def __init__(
        self, place: Place, master: str, config: Any, process_id: int, every_micros: int
    ) -> None:
        self._process_id, self._every_micros = process_id, every_micros
        self._graph = tf.Graph()
        self._ops = MembershipTable(self._graph, place)
        self._sessions = _Sessions(master, config)
        with self._graph.as_default():
            self._request = v1.placeholder(tf.int64, (None,), "request")
        self._to_prepare, self._to_join = self._ops.prepare(), self._ops.join(self._request)
        self._to_arm, self._to_take = self._ops.arm(self._request), self._ops.take(self._request)
        self._to_heartbeat = self._ops.heartbeat(self._request)
        self._to_leave = self._ops.leave(self._request)
        self.error: BaseException | None = None

    def take_slot(self) -> None:
        """Take a slot; sets `slot`, and `first`, the first notification.

        Raises OpError if the server is lost or the step is not initialised, SlotLostError if all
        slots are taken.
        """
        self._session = self._sessions.open(self._graph)
        run_in_graph(self._session, self._to_prepare)
        joined = self._ask(self._to_join, self._process_id, self._every_micros)
        self.first, self.slot = Notification.of(joined), int(joined[3])
        if self.slot < 0:
            raise SlotLostError(f"all {NUM_SLOTS} slots for processes that train are taken")

    def arm(self, threshold: int) -> Notification:
        """Have this process notified when the step reaches the threshold."""
        return Notification.of(self._ask(self._to_arm, self.slot, threshold))

    def take(self, wanted: int, held: int, stride: int, limit: int) -> tuple[Notification, int]:
        """Ask for credits for so many runs, and report the steps that are held here.

        Raises SlotLostError if the slot was freed, as `heartbeat` does.
        """
        reply = self._ask(self._to_take, self.slot, self._process_id, wanted, held, stride, limit)
        if reply[3] < 0:
            raise SlotLostError(_TAKEN_FOR_DEAD)
        return Notification.of(reply), int(reply[3])

    def heartbeat(self) -> tuple[Notification, np.ndarray]:
        """Count a heartbeat; returns a notification, and the rows of all slots."""
        reply = self._ask(self._to_heartbeat, self.slot, self._process_id)
        if reply[2 + self.slot][0] != self._process_id:
            raise SlotLostError(_TAKEN_FOR_DEAD)
        return Notification.of(reply[0]), reply[2:]

    def evict(self, slot: int, process_id: int, heartbeats: int) -> bool:
        """Free a dead process's slot; returns whether process and heartbeats were still these."""
        return bool(self._ask(self._to_leave, slot, process_id, heartbeats))

    def leave(self) -> None:
        self.evict(self.slot, self._process_id, -1)

    def listen(
        self, on_notification: Callable[[Notification], object], on_any: Callable[[], None]
    ) -> None:
        """Start the one blocked wait of this process; it ends with `close`, or sets `error`."""
        wait = self._ops.wait(self.slot)

        def serve() -> None:
            try:
                receive = self._sessions.open(self._graph).make_callable(wait)
                while not self._sessions.is_closed:
                    on_notification(Notification.of(receive()))
                    on_any()
            except BaseException as error:
                self.error = error
                on_any()

        TensorFlowThread(serve, "asynchooks-membership-wait")

    def close(self, *, leaves: bool = False) -> None:
        """End the wait and the sessions later; `leaves`: once the server has freed the slot."""
        self._sessions.close(*([self.leave] if leaves else []))

    def _ask(self, op: Any, *request: int) -> Any:
        return run_in_graph(self._session, op, {self._request: request})


class ReadyListener:
    """One blocked wait, in a thread, until a chief announces that the model is ready, or `close`.

    `on_ready` is called from the thread then; never if the server is lost. `close` does not block.
    """

    def __init__(
        self, place: Place, master: str, config: Any, on_ready: Callable[[], None]
    ) -> None:
        sessions = _Sessions(master, config)
        self.close = sessions.close

        def listen() -> None:
            with tf.Graph().as_default() as graph:
                ready = MembershipTable(graph, place).wait_ready()
            with suppress(tf.errors.OpError, RuntimeError):  # lost, or closed
                run_in_graph(sessions.open(graph), ready)
                on_ready()

        TensorFlowThread(listen, "asynchooks-ready")
