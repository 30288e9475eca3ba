"""Protocols of asynchronous training: who waits for whom, and which gradients make an update.

    server = ParameterServer(np.zeros(3), KAsync(6), num_workers=8)

    async def worker(index):
        while True:
            await server.begin_step(index)
            parameters, version = server.pull(index)
            server.push(index, await gradient(parameters), version)
            await server.end_step(index)

In one process and on one event loop; it runs alike in real and in virtual time, as nothing here
looks at a clock. Under sessions `ProtocolHook` does the waiting.
"""

from ._hook import ProtocolHook
from ._parse import parse_protocol
from ._policies import (
    Asynchronous,
    DiscardStale,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    StaleSynchronous,
    Synchronous,
)
from ._protocol import Protocol
from ._seats import Seats
from ._server import ParameterServer
from ._updates import staleness_aware
from ._values import ABANDONED, Fate, Pushed, Snapshot

__all__ = [
    "ABANDONED",
    "Asynchronous",
    "DiscardStale",
    "Fate",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "ParameterServer",
    "Protocol",
    "ProtocolHook",
    "Pushed",
    "Seats",
    "Snapshot",
    "StaleSynchronous",
    "Synchronous",
    "parse_protocol",
    "staleness_aware",
]
