"""The phases of a session, and what may be done in which."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Where a session stands; it goes through them once, in this order."""

    NEW = auto()
    OPENING = auto()
    OPEN = auto()
    CLOSING = auto()
    CLOSED = auto()

    def check_new(self) -> None:
        """Raise RuntimeError unless the session may be opened."""
        if self is not Phase.NEW:
            raise RuntimeError(
                f"the session is {self.name.lower()} already and can be opened only once; "
                "make a new MonitoredSession for each `async with`"
            )

    def check_open(self, what: str, *, in_opening: bool = False) -> None:
        """Raise RuntimeError unless `what` may be called now (also while it opens)."""
        if self is Phase.NEW or (self is Phase.OPENING and not in_opening):
            raise RuntimeError(
                f"{what}() before the session was opened; use it within `async with session:`"
            )
        if self in (Phase.CLOSING, Phase.CLOSED):
            raise RuntimeError(
                f"{what}() after the session was closed. Session is already closed: "
                "make a new MonitoredSession for each `async with`"
            )
