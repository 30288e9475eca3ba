"""Times of messages: cut links of workers, and a queue in front of a server."""

from __future__ import annotations

import heapq

from ..._check import integer
from ..._engine.base import Slot
from ..delays._delay import Delay
from ..delays._streams import DelayStream, Streams
from ..kernel._kernel import Kernel


class Queue:
    """Servers with one queue, first come first served: how long a request waits and is served.

    You make it through `Simulation.queue`, and call `serve` from any task. The request of a task
    that is cancelled is served all the same: it is under way.

    Example:
        simulation = Simulation(seed=7, backend="turbo")

        async def main():
            queue = simulation.queue(Constant(2.0))
            await queue.serve()
            return simulation.now

        assert simulation.run(main) == 2.0
    """

    __slots__ = ("_free_at", "_kernel", "_service", "num_served", "secs_busy", "secs_queued")

    def __init__(
        self, kernel: Kernel, streams: Streams, service: Delay, num_servers: int, name: str
    ) -> None:
        self._kernel = kernel
        self._service: DelayStream = streams.delays(0, f"service of {name}", service)
        self._free_at = [0.0] * integer("num_servers", num_servers, least=1)
        self.num_served = 0
        self.secs_queued = 0.0
        """Seconds that all requests together have waited for their turn."""
        self.secs_busy = 0.0
        """Seconds of service, over all servers."""

    def __repr__(self) -> str:
        return (
            f"<Queue for {len(self._free_at)} servers, {self._service.delay!r}, "
            f"{self.num_served} requests>"
        )

    async def serve(self) -> float:
        """Wait until a request of this task is served; returns the seconds that it took."""
        kernel, free_at = self._kernel, self._free_at
        asked = kernel.time
        begins = max(asked, free_at[0])
        service = self._service.next()
        ends = begins + self._service.delay.stretch(begins, service)
        heapq.heapreplace(free_at, ends)
        self.num_served += 1
        self.secs_queued += begins - asked
        self.secs_busy += ends - begins
        await kernel.park(Slot(kernel, "its turn at the server"), ends)
        return ends - asked


LinkCuts = tuple[tuple[float, float], ...]
"""(Begin, end) of each span of virtual seconds in which no message arrives."""


def arrival(cuts: LinkCuts, sent: float, arrives: float) -> float:
    """When a message really arrives, given when it would without cuts."""
    for begin, end in sorted(cuts):
        if sent < end and begin <= arrives:
            arrives = max(arrives, end)
    return arrives
