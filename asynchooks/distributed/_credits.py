"""When a process asks for tickets, how many, and when it gives them back. It asks nobody itself."""

from __future__ import annotations

import math
from typing import NamedTuple

from .._step_source import Demand

LARGEST_BATCH = 64
"""Runs asked for at once: what an exact stop costs is one request for each batch."""
_IDLE_SECS = 0.1
"""An allowance that nobody has touched for so long is given back: others may wait for it, and
whoever holds it for them."""
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.01, 0.5
"""Between two requests, when there was nothing to be had: others hold what is left."""


class Move(NamedTuple):
    """What to do next, in runs, and when to look again if nothing happens before."""

    ask: int = 0
    """For one request at a time; when it has been answered, look again at once."""
    give_back: int = 0
    look_at: float = math.inf
    is_idle: bool = False
    """Whether no run has begun for a while: what is said to be held should be the truth then."""


class Rations:
    """One process's requests for tickets. Its source makes it, and tells it what was granted.

    Batches grow while the process uses them up quickly; the source hands out less near the limit,
    so that one process does not hold what the others could run.
    """

    def __init__(self) -> None:
        self._batch = 1
        self._last_grant = 0
        self._asked_at = -math.inf
        self._pause = 0.0
        self._num_granted = -1  # as of the last look
        self._busy_at = -math.inf

    def next_move(self, demand: Demand, now: float) -> Move:
        """What this process should do; `now` in seconds on any clock that never goes back."""
        if demand.num_granted != self._num_granted:
            self._num_granted, self._busy_at = demand.num_granted, now
        if demand.limit is None or not (demand.workers_open or demand.num_short):
            # a run that was left behind; without a limit nobody else waits for what is held here
            is_left = demand.num_out and not demand.workers_open
            look_at = now + _IDLE_SECS if is_left else math.inf
            return Move(give_back=demand.num_spare, look_at=look_at, is_idle=True)
        is_busy = now < self._busy_at + _IDLE_SECS
        if demand.num_spare and not is_busy:
            # a run may take one before they are given back, and then they are not
            return Move(give_back=demand.num_spare, look_at=now + _IDLE_SECS, is_idle=True)
        look_at = math.inf
        if is_busy or demand.num_out:  # nobody says when a run has ended that was the last
            look_at = (self._busy_at if is_busy else now) + _IDLE_SECS
        if demand.num_short or (is_busy and demand.num_spare <= self._last_grant // 2):
            may_ask_at = self._asked_at + self._pause
            if now < may_ask_at:
                return Move(look_at=min(look_at, may_ask_at))
            return Move(ask=max(self._batch, demand.num_short), look_at=look_at)
        return Move(look_at=look_at, is_idle=not is_busy)

    def take_note(self, granted: int, demand: Demand, now: float) -> None:
        """A request was answered with so many runs."""
        if granted == 0:
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECS), _LONGEST_PAUSE_SECS)
        else:
            is_quick = now - self._asked_at < _IDLE_SECS
            batch = 2 * self._batch if is_quick else self._batch // 2
            self._batch = min(max(batch, demand.workers_open, 1), LARGEST_BATCH)
            self._pause, self._last_grant = 0.0, granted
        self._asked_at = now
