"""What a parameter server and the processes that train with it tell each other; plain values.

Each request carries a `Report` of its process, each answer the `State` of the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..protocols import Snapshot


class ServerAddress(NamedTuple):
    """Where a parameter server is: give it to the processes that train with it."""

    worker: str
    """The address of the Dask worker that it lives on, such as "tcp://127.0.0.1:40001"."""
    key: str
    """The name of its actor there."""


class State(NamedTuple):
    """How far the server is."""

    number: int
    """Of changes of all but the version: of two states the one with the larger is newer."""
    epoch: int
    version: int
    limit: int | None
    is_closed: bool

    @property
    def is_over(self) -> bool:
        """Whether no update will come."""
        return self.is_closed or (self.limit is not None and self.version >= self.limit)

    def is_news_to(self, other: State) -> bool:
        """Whether more has changed since then than the version."""
        return self.number > other.number


class Report(NamedTuple):
    """What a process needs, and what it knows."""

    process: str
    number: int
    """Requests overtake each other: of two reports the one with the larger number is newer."""
    known: State | None
    next_step: float
    """The lowest version that somebody waits for there; infinite if nobody does."""
    limit: int | None
    """What its step is limited to, if it is."""
    has_sessions: bool
    released: tuple[int, ...]
    """Waits that were asked for, and that nobody waits for any more."""
    received: int
    """The number of the last ending that came."""


class Ending(NamedTuple):
    """How a wait ended."""

    wait: int
    """As its process has numbered it."""
    error: Exception | None


class News(NamedTuple):
    """What a process hears by its blocked request, beside the state."""

    received: int
    """The number of the last ending."""
    endings: list[Ending]
    snapshot: Snapshot | None
    """The parameters, if somebody may begin a step: once, however many may."""


class Welcome(NamedTuple):
    """What a process has to know of the server from the start."""

    num_workers: int
    abandons_stale: bool
    waits_after: bool
    lease_secs: float
    what: str
    """For people."""


Answer = tuple[State, Any]


@dataclass(frozen=True)
class HostStatistics:
    """What a parameter server that many processes share holds at one moment; all counts."""

    version: int
    processes: int
    """Processes that are connected, or whose workers are still expected back."""
    processes_away: int
    """Those of them that are silent for longer than the lease."""
    workers_present: int
    waits: int
    """Workers' waits that have not ended, or whose end has not been fetched."""
    blocked_requests: int
    """Requests that wait for news: at most one for each process."""
    requests: int
    """Ever; asking for this is one."""
    collected: int
    applied: int
    discarded: int
