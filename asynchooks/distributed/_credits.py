"""When a process requests credits, how many, and when it returns them; how many it gets.

It sends no request: the sources of steps do, and the tables of their members grant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .._step.remote import Demand

LARGEST_BATCH = 64
"""Credits in one request: an exact stop costs one request for each batch."""
_IDLE_SECS = 0.1
"""Credits that were not used for so long are returned: other processes may wait for them."""
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.01, 0.5
"""Between two requests, after one that was granted none: other processes hold the rest."""


def share_of(free: Any, num_members: Any, maximum: Callable[[Any, Any], Any] = max) -> Any:
    """How many of the free credits one member gets at most, >= 1.

    Near the limit it is half of an equal share, so that one process does not hold credits that
    others could use. The numbers may be tensors, with `maximum` for those.
    """
    return maximum(free // (2 * maximum(num_members, 1)), 1)


class Move(NamedTuple):
    """What to do next, in credits, and when to look again if nothing happens before."""

    ask: int = 0
    """For one request at a time; when it has been answered, look again at once."""
    give_back: int = 0
    look_at: float = math.inf
    is_idle: bool = False
    """Whether no run has begun for a while: the reported number of credits must be exact then."""


class CreditPolicy:
    """Decides on one process's requests for credits. Its source makes it and reports each grant.

    Batches grow while the process uses them up quickly; near the limit the source grants less, so
    that one process does not hold credits that others could use.
    """

    def __init__(self) -> None:
        self._batch = 1
        self._last_grant = 0
        self._asked_at = -math.inf
        self._pause = 0.0
        self._num_granted = -1  # as of the last look
        self._busy_at = -math.inf

    def next_move(self, demand: Demand, now: float) -> Move:
        """What this process should do; `now` in seconds on a monotonic clock."""
        if demand.num_granted != self._num_granted:
            self._num_granted, self._busy_at = demand.num_granted, now
        if demand.limit is None or not (demand.workers_open or demand.num_short):
            # a run that was abandoned; without a limit no process waits for credits held here
            is_left = demand.num_out and not demand.workers_open
            look_at = now + _IDLE_SECS if is_left else math.inf
            return Move(give_back=demand.num_spare, look_at=look_at, is_idle=True)
        is_busy = now < self._busy_at + _IDLE_SECS
        if demand.num_spare and not is_busy:
            # a run may take one before they are returned; then they are kept
            return Move(give_back=demand.num_spare, look_at=now + _IDLE_SECS, is_idle=True)
        look_at = math.inf
        if is_busy or demand.num_out:  # no event reports the end of the last run
            look_at = (self._busy_at if is_busy else now) + _IDLE_SECS
        if demand.num_short or (is_busy and demand.num_spare <= self._last_grant // 2):
            may_ask_at = self._asked_at + self._pause
            if now < may_ask_at:
                return Move(look_at=min(look_at, may_ask_at))
            return Move(ask=max(self._batch, demand.num_short), look_at=look_at)
        return Move(look_at=look_at, is_idle=not is_busy)

    def take_note(self, granted: int, demand: Demand, now: float) -> None:
        """A request was granted so many credits."""
        if granted == 0:
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECS), _LONGEST_PAUSE_SECS)
        else:
            is_quick = now - self._asked_at < _IDLE_SECS
            batch = 2 * self._batch if is_quick else self._batch // 2
            self._batch = min(max(batch, demand.workers_open, 1), LARGEST_BATCH)
            self._pause, self._last_grant = 0.0, granted
        self._asked_at = now
