"""What one process asks a scheduler to do once. How things stand is said beside it."""

from __future__ import annotations

from typing import NamedTuple

from .._engine import Slot


class Action(NamedTuple):
    """Something to do at the scheduler, once, and who waits until it is done."""

    num_runs: int = 0
    published: int = 0
    restart_at: int | None = None
    restart_of: str = ""
    is_done: bool = False
    epoch: str = ""
    ticket_of: int | None = None
    """The step's epoch here in which a run got its ticket, if it has one."""
    slot: Slot | None = None


class Begun(NamedTuple):
    """In which epoch a run began, by the scheduler and by the step here."""

    epoch: str
    local_epoch: int
