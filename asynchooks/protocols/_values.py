"""What a worker is given by the parameter server, and what it hears of its gradient."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from .._signal import Signal

ABANDONED = Signal("ABANDONED")
"""What `ParameterServer.watch_update` wakes a slot with."""


class Snapshot(NamedTuple):
    """The parameters as they were pulled, and the number of updates that made them.

    The arrays are the server's own, for reading only: it never changes them, an update makes new
    ones.
    """

    parameters: Any
    version: int


class Fate(Enum):
    """What became of a gradient."""

    APPLIED = "applied"
    """It made an update, with those that were collected before."""
    COLLECTED = "collected"
    """It waits for more, to make an update together."""
    DISCARDED = "discarded"
    """It comes to nothing: too stale for the protocol, or training is over."""


class Pushed(NamedTuple):
    """What became of a gradient, and its staleness.

    `staleness` is the number of updates between the pull and the update that the gradient is part
    of, or that it came too late for. It is below 0 for a version that a restore has undone.
    """

    fate: Fate
    staleness: int

    @property
    def is_applied(self) -> bool:
        """Whether it made an update."""
        return self.fate is Fate.APPLIED

    @property
    def is_collected(self) -> bool:
        """Whether it waits for more."""
        return self.fate is Fate.COLLECTED

    @property
    def is_discarded(self) -> bool:
        """Whether it came to nothing."""
        return self.fate is Fate.DISCARDED
