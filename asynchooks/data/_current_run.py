"""CurrentRun: where the run of a session stands, for those whose items it uses. It runs nothing."""

from __future__ import annotations

from .._hook import SessionRunContext
from .._stopping.session_stop import SessionStop


class CurrentRun:
    """A run between its step and `after_run` of a hook: another worker may save meanwhile.

    Args:
        stops: of the session.
    """

    __slots__ = ("_context", "stops")

    def __init__(self, stops: SessionStop | None) -> None:
        self.stops = stops
        self._context: SessionRunContext | None = None

    def begin(self, context: SessionRunContext | None) -> None:
        self._context = context
        if self.stops is not None and self.stops.owner is not None:
            self.stops.owner.has_run = False

    def end(self) -> None:
        self.begin(None)

    def has_ended(self) -> bool:
        """Whether its step has ended, though not yet for all hooks."""
        owner = None if self.stops is None else self.stops.owner
        if owner is not None and owner.has_run:  # in a thread, and its task has not come back
            return True
        hooks = None if self._context is None else self._context._hooks
        call = None if hooks is None else hooks.current
        return call is not None and call.moment == "after_run"
