"""BoardLink: one process's seat at a notice board, through sessions of its own.

Every method blocks. Nothing is tried again here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ._board_ops import BoardOps
from ._board_pieces import NUM_SEATS, Place
from ._end_of_process import TensorFlowThread

v1 = tf.compat.v1


class Notice(NamedTuple):
    """What the board said: the step, its epoch, and how many seats have been taken so far."""

    step: int
    epoch: int
    num_taken: int

    @classmethod
    def of(cls, values: Any) -> Notice:
        return cls(*[int(each) for each in values[:3]])


class SeatLostError(RuntimeError):
    """Nobody had heard of this process for a while, or there is no seat yet, or none left."""


class BoardLink:
    """A seat, from `take_seat` until `close`. Making it adds operations, and asks nobody.

    Args:
        place: where the step lives.
        master: the address through which the server is reached.
        config: a `tf.compat.v1.ConfigProto`, or None.
        owner: who takes the seat, > 0.
        every_micros: microseconds between its beats.
    """

    first: Notice
    seat: int

    def __init__(
        self, place: Place, master: str, config: Any, owner: int, every_micros: int
    ) -> None:
        self._owner, self._every_micros = owner, every_micros
        self._graph = tf.Graph()
        self._ops = BoardOps(self._graph, place)
        self._sessions: list[Any] = []
        self._master, self._config = master, _without_timeout(config)
        with self._graph.as_default():
            self._request = v1.placeholder(tf.int64, (None,), "request")
        self._to_prepare, self._to_join = self._ops.prepare(), self._ops.join(self._request)
        self._to_arm, self._to_take = self._ops.arm(self._request), self._ops.take(self._request)
        self._to_beat = self._ops.beat(self._request)
        self._leave = self._ops.leave(self._request)
        self.error: BaseException | None = None
        self._is_closed = False

    def take_seat(self) -> None:
        """Ask for a seat, which is in `seat` then, and the board's words in `first`.

        Raises:
            tf.errors.OpError: the server is lost, or the step is not initialised.
            SeatLostError: all seats are taken.
        """
        self._session = self._open()
        try:
            self._session.run(self._to_prepare)
            request = [self._owner, self._every_micros]
            joined = self._session.run(self._to_join, {self._request: request})
            self.first, self.seat = Notice.of(joined), int(joined[3])
            if self.seat < 0:
                raise SeatLostError(f"all {NUM_SEATS} seats for processes that train are taken")
        except BaseException:
            self.close()
            raise
        self._arm, self._take, self._beat = (
            self._session.make_callable(each, [self._request])
            for each in (self._to_arm, self._to_take, self._to_beat)
        )

    def arm(self, threshold: int) -> Notice:
        """Have this process told when the step is there."""
        return Notice.of(self._arm([self.seat, threshold]))

    def take(self, wanted: int, in_hand: int, stride: int, limit: int) -> tuple[Notice, int]:
        """Ask for tickets for so many runs, and say which steps others must reckon with.

        Raises:
            SeatLostError: others have taken this process for dead.
        """
        said = self._take([self.seat, self._owner, wanted, in_hand, stride, limit])
        if said[3] < 0:
            raise SeatLostError("other processes have taken this one for dead")
        return Notice.of(said), int(said[3])

    def beat(self) -> tuple[Notice, np.ndarray]:
        """Say that this process lives; a notice, and the rows of all seats."""
        said = self._beat([self.seat, self._owner])
        if said[2 + self.seat][0] != self._owner:
            raise SeatLostError("other processes have taken this one for dead")
        return Notice.of(said[0]), said[2:]

    def evict(self, seat: int, owner: int, beats: int) -> bool:
        """Empty the seat of a process that is dead; whether it was still as said."""
        return bool(self._session.run(self._leave, {self._request: [seat, owner, beats]}))

    def leave(self) -> None:
        self.evict(self.seat, self._owner, -1)

    def listen(self, on_notice: Callable[[Notice], object], on_any: Callable[[], None]) -> None:
        """Start the one blocked wait of this process; it ends with `close`, or sets `error`."""
        wait = self._ops.wait(self.seat)

        def serve() -> None:
            try:
                receive = self._open().make_callable(wait)
                while not self._is_closed:
                    on_notice(Notice.of(receive()))
                    on_any()
            except BaseException as error:
                self.error = error
                on_any()

        TensorFlowThread(serve, "asynchooks-board-wait")

    def close(self, *, leaves: bool = False) -> None:
        """End the blocked wait, and the sessions, without waiting for a server that is silent.

        Args:
            leaves: whether to give the seat back first, whenever the server answers.
        """
        self._is_closed = True
        sessions, self._sessions = self._sessions, []

        def close() -> None:
            if leaves:
                with suppress(Exception):  # it is lost
                    self.leave()
            _close_all(sessions)

        if sessions:
            TensorFlowThread(close, "asynchooks-board-close")

    def _open(self) -> Any:
        session = v1.Session(self._master, graph=self._graph, config=self._config)  # may block
        self._sessions.append(session)
        if self._is_closed:  # looked at after it is among those that `close` closes
            _close_all([session])
            raise SeatLostError("this process has left")
        return session


class ReadyEar:
    """One blocked wait for a chief's word that the model is ready, in a thread, until `close`.

    Args:
        place: where the step lives, or will.
        master, config: as for `BoardLink`.
        on_word: called from the thread when a chief has said so; never if the server is lost.
    """

    def __init__(self, place: Place, master: str, config: Any, on_word: Callable[[], None]) -> None:
        self._place, self._master, self._config = place, master, _without_timeout(config)
        self._on_word = on_word
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
            heard = BoardOps(graph, self._place).wait_ready()
        session = v1.Session(self._master, graph=graph, config=self._config)  # may block for long
        with self._guard:
            self._session = session
            if self._is_closed:
                _close_all([session])
        with suppress(tf.errors.OpError, RuntimeError):  # lost, or closed
            self._session.run(heard)
            self._on_word()


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
