"""The messages between a parameter server and the processes that train with it; plain values.

Each request carries a `Report` of its process, each answer the `State` of the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...protocols import Snapshot
from .._membership import State


class ServerAddress(NamedTuple):
    """Where a parameter server is: give it to the processes that train with it."""

    worker: str
    """The address of the Dask worker that it lives on, such as "tcp://127.0.0.1:40001"."""
    key: str
    """The name of its actor there."""


class Report(NamedTuple):
    """What a process waits for, and what it knows."""

    process: str
    number: int
    """Requests overtake each other: the report with the larger number is newer."""
    known: State | None
    next_step: float
    """The lowest version that a task there waits for; infinite if none does."""
    limit: int | None
    """The limit of its step, if any."""
    has_sessions: bool
    released: tuple[int, ...]
    """Waits that were requested and are abandoned now."""
    received: int
    """The number of the last received ending."""


class Ending(NamedTuple):
    """How a wait ended."""

    wait: int
    """Its number, given by its process."""
    error: Exception | None


class News(NamedTuple):
    """The answer to a process's blocked request, beside the state."""

    received: int
    """The number of the last ending."""
    endings: list[Ending]
    snapshot: Snapshot | None
    """The parameters, if any worker may begin a step: once for all of them."""


class Welcome(NamedTuple):
    """The properties of the server, which a process gets when it connects."""

    num_workers: int
    abandons_stale: bool
    waits_after: bool
    lease_secs: float
    what: str
    """The protocol, for messages."""


Answer = tuple[State, Any]


@dataclass(frozen=True)
class HostStatistics:
    """Counts of a parameter server that many processes share, at one moment."""

    version: int
    processes: int
    """Processes that are connected, or whose workers are still expected back."""
    processes_away: int
    """Those of them that are silent for longer than the lease."""
    workers_present: int
    waits: int
    """Workers' waits that have not ended, or whose end was not received."""
    blocked_requests: int
    """Requests that wait for news: at most one for each process."""
    requests: int
    """Ever, with the one for these counts."""
    collected: int
    applied: int
    discarded: int
