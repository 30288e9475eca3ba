"""The messages between a parameter server and the processes that train with it; plain values.

Each request carries a `Report` of its process, each answer the `State` of the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...protocols import Snapshot
from .._membership import State


class ServerAddress(NamedTuple):
    """Where a parameter server is: give it to the processes that train with it.

    Example:
        async with host_parameter_server(
            client, np.zeros(3), Asynchronous(), num_workers=4
        ) as server:
            address = server.address  # send it to the processes that train
    """

    worker: str
    """The address of the Dask worker that it lives on, such as "tcp://127.0.0.1:40001"."""
    key: str
    """The name of its actor there."""


class Report(NamedTuple):
    """What a process waits for, and what it knows."""

    process: str
    number: int  # requests overtake each other: the report with the larger number is newer
    known: State | None
    next_step: float  # the lowest version that a task there waits for; infinite: none
    limit: int | None  # of its step
    has_sessions: bool
    released: tuple[int, ...]  # waits that were requested and are abandoned now
    received: int  # the number of the last received ending


class Ending(NamedTuple):
    """The end of a wait."""

    wait: int  # its number, given by its process
    error: Exception | None


class News(NamedTuple):
    """The answer to a process's blocked request, beside the state."""

    received: int  # the number of the last ending
    endings: list[Ending]
    snapshot: Snapshot | None  # the parameters, if any worker may begin a step


class Welcome(NamedTuple):
    """The properties of the server, which a process gets when it connects."""

    num_workers: int
    abandons_stale: bool
    waits_after: bool
    lease_secs: float
    protocol: str  # for messages


Answer = tuple[State, Any]


@dataclass(frozen=True)
class HostStatistics:
    """Counts of a parameter server that many processes share, at one moment.

    Example:
        async with RemoteParameterServer(address) as server:
            statistics = await server.statistics()
    """

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
