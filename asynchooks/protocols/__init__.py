"""Protocols of asynchronous training: when workers wait, and which gradients make an update.

    server = ParameterServer(np.zeros(3), KAsync(6), num_workers=8)

    async def worker(index):
        while True:
            await server.begin_step(index)
            parameters, version = server.pull(index)
            server.push(index, await gradient(parameters), version)
            await server.end_step(index)

All in one process and on one event loop. It behaves the same in real and in virtual time, as
nothing here reads a clock. Under sessions `ProtocolHook` does the waiting.
"""

from .._later import listing
from ._compute import ABANDONED
from ._gradients import Outcome, Pushed, Snapshot
from ._hook import ProtocolHook
from ._membership import Membership
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
from ._server import ParameterServer, Protocol
from ._updates import staleness_aware

__all__ = [
    "ABANDONED",
    "Asynchronous",
    "DiscardStale",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "Membership",
    "Outcome",
    "ParameterServer",
    "Protocol",
    "ProtocolHook",
    "Pushed",
    "Snapshot",
    "StaleSynchronous",
    "Synchronous",
    "parse_protocol",
    "staleness_aware",
]

__dir__ = listing(__name__)
