"""Beats: which of the processes at a board live, and how long one may take itself to live.

It counts what it is shown, and asks nobody.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_BEATS_MISSED = 4
"""After so many beats of ours without one of another process, it is silent."""
_BEATS_WAITED = 24
"""After so many, nobody waits for it any longer, even if it may go on."""
BEATS_LEASED = _BEATS_MISSED - 0.5
"""For so many beats after one, what was granted may be used: a process that was stopped must not
run, when it goes on, what others have been given meanwhile."""


class Silent(NamedTuple):
    """A process that has not been heard of for a while: its seat, as last seen."""

    seat: int
    owner: int
    held: int  # steps
    beats: int
    is_new: bool  # since this beat
    is_for_long: bool


class Beats:
    """Who among the others has been heard of, counted in beats of our own.

    Not by a clock: after a server was stopped for a while, all are late alike.
    """

    def __init__(self, every_secs: float) -> None:
        self.every_secs = every_secs
        self._seen: dict[int, tuple[int, int, int]] = {}  # seat: owner, beats, ours since then
        self._lost = 0, 0  # runs of an earlier epoch: how many, for how many beats

    def have_lasted(self, num_lost: int) -> bool:
        """Whether so many lost runs are there that should have ended: who answers ends them."""
        num, count = self._lost
        self._lost = num_lost, count + 1 if num_lost and num_lost == num else 0
        return self._lost[1] >= _BEATS_MISSED

    def missed(self, rows: np.ndarray, own_seat: int) -> list[Silent]:
        """Who is silent now."""
        found = []
        before, self._seen = self._seen, {}
        for seat in np.flatnonzero(rows[:, 0]).tolist():
            owner, held, count, every = rows[seat].tolist()
            if seat == own_seat:
                continue
            old = before.get(seat)
            missed = old[2] + 1 if old is not None and old[:2] == (owner, count) else 0
            self._seen[seat] = owner, count, missed
            ours = max(1.0, every / 1e6 / self.every_secs)  # in one of theirs
            if missed >= _BEATS_MISSED * ours:
                is_new = missed - 1 < _BEATS_MISSED * ours
                is_for_long = missed >= _BEATS_WAITED * ours
                found.append(Silent(seat, owner, held, count, is_new, is_for_long))
        return found
