"""Parameter servers with two parameters or others, and protocols of every kind."""

from typing import Any

import numpy as np

from asynchooks.protocols import (
    Asynchronous,
    DiscardStale,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    ParameterServer,
    Protocol,
    StaleSynchronous,
    Synchronous,
)

ALL: list[Protocol] = [
    Asynchronous(), Synchronous(), KSync(2), KBatchSync(2), KAsync(2), KBatchAsync(3),
    StaleSynchronous(0), StaleSynchronous(2), DiscardStale(KBatchAsync(2), 1),
]  # fmt: skip


def server_of(
    parameters: Any, protocol: Protocol | None = None, num_workers: int = 2, **arguments: Any
) -> ParameterServer:
    protocol = protocol or Asynchronous()
    return ParameterServer(parameters, protocol, num_workers=num_workers, **arguments)


def make_server(
    protocol: Protocol, num_workers: int = 2, limit: int | None = None, **arguments: Any
) -> ParameterServer:
    server = server_of(np.ones(2), protocol, num_workers, **arguments)
    if limit is not None:
        server.global_step.raise_limit(limit)
    return server
