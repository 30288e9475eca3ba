"""Board: what this process knows of a server's notice board, and asks of it.

One thread asks, and another holds the one blocked wait of the process. The operations are
`_board_ops`'s; who waits here, and who runs steps, is known to the `GlobalStep`.
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

from .._engine import system_now
from .._errors import is_preemption
from .._global_step import GlobalStep
from .._step_source import Demand, SourceState, StepSource
from ..distributed._rations import Rations
from ._beats import BEATS_LEASED, Beats, Silent
from ._board_link import BoardLink, Notice, SeatLostError
from ._board_pieces import HELD, NEVER, OWNER, Place
from ._end_of_process import TensorFlowThread
from ._owners import Owners
from ._patient import GivenUp, PatientThread

logger = logging.getLogger("asynchooks")

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
"""Between two tries to find the board again."""
_LEAST_PATIENCE_SECS = 3.0
"""Before silence is reported: the first run of each kind is compiled, on a busy machine perhaps."""


class Board(StepSource):
    """Brings a server's global step to the one of this process, and rations its last steps.

    The server of this process (`_server.Server`) makes it with the first session there, and closes
    it with the last. Threads of its own, because it must go on while the event loop is busy.

    Args:
        step: where to publish; the board feeds it until it is closed.
        place: where the step lives.
        master: the address through which the server is reached.
        config: a `tf.compat.v1.ConfigProto`, or None.
        owners: who this process is, and the others.
        heartbeat_secs: seconds, > 0: it beats twice in that time, and silence for so long is
            reported.
        stride: by how much one run moves the step.
        on_notice: called with all that the board says; whether it is of the newest epoch.
        on_silence: called with an error to raise, when nobody answers.
    """

    rations = True

    def __init__(
        self,
        step: GlobalStep,
        place: Place,
        master: str,
        config: Any,
        owners: Owners,
        heartbeat_secs: float,
        stride: int,
        on_notice: Callable[[Notice], bool],
        on_silence: Callable[[str], None],
    ) -> None:
        self.stride = stride
        self.place = place
        self._step = step
        self._on_notice = on_notice
        self._on_silence = on_silence
        self._heartbeat_secs = heartbeat_secs
        self._owners = owners
        self._new_link = partial(BoardLink, place, master, config, owners.new())
        self._where = f"the board of {place.name} at {place.device or master}"
        self._changed = threading.Condition()
        self._is_due = False  # somebody has called look_again
        self._is_closed = False
        self._is_silent = False
        self._has_linked = False  # since the last loss: sessions older than that are lost, too
        self._newest: Notice | None = None  # what was heard last
        self._calls = PatientThread("asynchooks-board-calls")
        step.feed_from(self, stride)
        TensorFlowThread(self._serve, "asynchooks-board")
        TensorFlowThread.close_at_exit(self)

    def look_again(self) -> None:
        with self._changed:
            self._is_due = True
            self._changed.notify()

    def close(self) -> None:
        """Leave the board. Returns at once; what is under way there is left behind."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._is_silent:  # looked at after it was closed, as the other looks the other way round
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
                    self._visit()
                    pause = _FIRST_PAUSE_SECS
                except (tf.errors.OpError, SeatLostError, RuntimeError) as error:
                    self._set_state(SourceState.LOST, _in_short(error))
                    if is_preemption(error) and self._has_linked and self._is_newest():
                        self._on_silence(f"{self._where} is lost: {_in_short(error)}")
                    self._has_linked = False
                    pause = min(max(2 * pause, _FIRST_PAUSE_SECS), _LONGEST_PAUSE_SECS)
        except GivenUp:
            pass
        finally:
            self._calls.give_up()

    def _visit(self) -> None:
        """Take a seat and keep it, until it is lost or this is closed."""
        if self._is_closed:
            return
        # made before anybody is asked: on a busy machine that alone takes seconds
        link = self._new_link(int(self._heartbeat_secs * 5e5))
        moment = system_now()
        try:
            self._call(link.take_seat)
            held = self._begin_seat(link)
            self._lease_from(moment)
            self._has_linked = True
            if not self._note(link.first):
                raise SeatLostError("no chief has initialised the model since the server started")
            link.listen(self._note, self.look_again)
            self._set_state(SourceState.LIVE)
            self._attend(link, held)
        except GivenUp:  # once the server answers, others should not have to wait for this one
            link.close(leaves=True)
            raise
        finally:
            link.close()

    def _note(self, notice: Notice) -> bool:
        if self._newest is None or notice.epoch >= self._newest.epoch:
            self._newest = notice
        return self._on_notice(notice)

    def _is_newest(self) -> bool:
        """Whether nobody knows of a newer epoch: else sessions have been recreated already."""
        return self._newest is None or self._on_notice(self._newest)

    def _begin_seat(self, link: BoardLink) -> int:
        """Give up what was granted to another seat; say, and return, what is held all the same."""
        demand = self._step.demand()
        while demand.num_spare and not self._is_closed:
            self._grant(-demand.num_spare, demand)
            demand = self._step.demand()
        held = self.stride * demand.num_out
        if held:
            self._call(link.take, 0, held, self.stride, 0)
        return held

    def _lease_from(self, moment: float) -> None:
        with self._changed:
            if not self._is_closed:
                self._step.lease(moment + BEATS_LEASED * self._heartbeat_secs / 2)

    def _attend(self, link: BoardLink, held: int) -> None:
        rations, beats = Rations(), Beats(self._heartbeat_secs / 2)
        armed, beat_at = NEVER, system_now()
        while True:
            with self._changed:
                if self._is_closed:
                    break
                self._is_due = False
            if link.error is not None:
                raise link.error
            demand, moment = self._step.demand(), system_now()
            wanted = NEVER if math.isinf(demand.next_step) else int(demand.next_step)
            if wanted != armed:
                self._note(self._call(link.arm, wanted))
                armed = wanted
            move = rations.next_move(demand, moment)
            if move.give_back and self._grant(-move.give_back, demand):
                demand = demand._replace(num_spare=0)
            in_hand = self.stride * (demand.num_out + demand.num_spare)
            if move.ask:
                held = in_hand + self.stride * self._ask(link, rations, demand, move.ask, in_hand)
            elif move.is_idle and held != in_hand:
                self._call(link.take, 0, in_hand, self.stride, 0)
                held = in_hand
            if moment >= beat_at:
                self._beat(link, beats)
                if beats.have_lasted(demand.num_lost):
                    self._step.forget_lost(demand.epoch)
                beat_at = moment + beats.every_secs
            with self._changed:
                until = 0.0 if move.ask else min(beat_at, move.look_at) - system_now()
                self._changed.wait_for(lambda: self._is_due or self._is_closed, max(0.0, until))
        self._call(link.leave)

    def _ask(
        self, link: BoardLink, rations: Rations, demand: Demand, runs: int, in_hand: int
    ) -> int:
        """Ask for tickets; returns how many runs are granted."""
        assert demand.limit is not None
        notice, granted = self._call(link.take, runs, in_hand, self.stride, demand.limit)
        self._note(notice)
        rations.take_note(granted, demand, system_now())
        if granted:
            self._grant(int(granted), demand)
        return int(granted)

    def _grant(self, runs: int, demand: Demand) -> bool:
        return self._step.grant(runs, epoch=demand.epoch, limit=demand.limit, source=self)

    def _beat(self, link: BoardLink, beats: Beats) -> None:
        moment = system_now()
        notice, rows = self._call(link.beat)
        self._lease_from(moment)
        self._note(notice)
        owners = rows[:, OWNER]
        own = int(owners[link.seat])
        for seat in self._owners.predecessors(own, owners):
            if self._call(link.evict, seat, int(owners[seat]), -1):
                logger.info(
                    "%s has come again on %s; the %d steps that it may have been about to make "
                    "before are given to others",
                    self._owners.name(own), self._where, int(rows[seat, HELD]),
                )  # fmt: skip
        for each in beats.missed(rows, link.seat):
            self._attend_to_silent(link, each, owners)

    def _attend_to_silent(self, link: BoardLink, silent: Silent, owners: np.ndarray) -> None:
        name = self._owners.name(silent.owner)
        if not silent.is_for_long and self._owners.may_go_on(silent.owner, owners):
            if silent.is_new:
                logger.info(
                    "Nothing has been heard of %s on %s for a while, yet it has not ended; it "
                    "keeps the %d steps that it may be about to make",
                    name, self._where, silent.held,
                )  # fmt: skip
        elif self._call(link.evict, silent.seat, silent.owner, silent.beats):
            logger.warning(
                "Nothing has been heard of %s on %s for a while; the %d steps that it may have "
                "been about to make are given to others",
                name, self._where, silent.held,
            )  # fmt: skip

    def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        def impatient() -> None:
            self._is_silent = True
            problem = f"nobody has answered for {secs:g} s"
            self._set_state(SourceState.LOST, problem)
            if self._has_linked:  # else whoever opens a session there notices for itself
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
