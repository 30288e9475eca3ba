"""The phases of a session, what may be done in which, and one run at a time."""

from __future__ import annotations

from enum import Enum, auto

from .._engine.sync import Condition


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

    def check_open(self, what: str, *, in_opening: bool = False, in_closing: bool = False) -> None:
        """Raise RuntimeError unless `what` may be called now (also while it opens, or closes)."""
        if self is Phase.NEW or (self is Phase.OPENING and not in_opening):
            raise RuntimeError(
                f"{what}() before the session was opened; use it within `async with session:`"
            )
        if self is Phase.CLOSED or (self is Phase.CLOSING and not in_closing):
            raise RuntimeError(
                f"{what}() after the session was closed. Session is already closed: "
                "make a new MonitoredSession for each `async with`"
            )


class OneRun(Condition):
    """One run at a time: hooks and the global step could not tell two apart.

    The task that begins a run checks, and sets `is_under_way`; at its end it notifies the waiters.
    """

    __slots__ = ("is_in_step_fn", "is_under_way")

    def __init__(self) -> None:
        super().__init__()
        self.is_under_way = False
        self.is_in_step_fn = False  # and the runs in it, one at a time, are part of its run

    def check(self, phase: Phase, what: str) -> None:
        """Raise RuntimeError unless `what` may run now."""
        if self.is_in_step_fn and not self.is_under_way:
            return  # it began in time, though the session may be closing by now
        phase.check_open(what)
        if self.is_under_way:
            raise RuntimeError(
                f"{what}() while another run of this session is under way. A session runs one "
                "step at a time: give each task a session of its own (SharedSessionCreator lends "
                "them one model), and within a step_fn use step_context.run_with_hooks()"
            )

    async def wait_for_other(self, until: float) -> None:
        """Wait for the run of another task, until then at most."""
        await self.wait_until(lambda: not self.is_under_way, "another task's run", until)

    def end(self) -> None:
        self.is_under_way = self.is_in_step_fn = False
        if self.slots:
            self.notify()
