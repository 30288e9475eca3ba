"""What messages take: links of workers, and a server that serves one after the other.

It moves no message: it says when one arrives, and sleeps until then.
"""

from __future__ import annotations

import heapq

from .._engine import Slot
from ._delays import Delay
from ._kernel import Kernel
from ._streams import DelayStream, Streams


class Queue:
    """Servers with one queue, first come first served: how long a request waits and is served.

    You make it through `Simulation.queue`, and call `serve` from any task. Whoever is cancelled
    meanwhile is served all the same: the request is under way.

    Args:
        kernel: whose time passes.
        streams: of its random numbers.
        service: seconds that a request takes once it is its turn.
        num_servers: how many requests are served side by side, >= 1.
        name: its service times are drawn for this purpose.
    """

    __slots__ = ("_free_at", "_kernel", "_service", "num_served", "secs_busy", "secs_queued")

    def __init__(
        self, kernel: Kernel, streams: Streams, service: Delay, num_servers: int, name: str
    ) -> None:
        if not isinstance(num_servers, int) or num_servers < 1:
            raise ValueError(f"num_servers is {num_servers!r}; give an integer >= 1")
        self._kernel = kernel
        self._service: DelayStream = streams.delays(0, f"service of {name}", service)
        self._free_at = [0.0] * num_servers
        self.num_served = 0
        self.secs_queued = 0.0
        """Seconds that all requests together have waited for their turn."""
        self.secs_busy = 0.0
        """Seconds of service, over all servers."""

    async def serve(self) -> float:
        """Wait for one's turn and be served; returns the seconds that both took."""
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


class Closures:
    """When a worker's links are cut: no message arrives within these times."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def add(self, begin: float, end: float) -> None:
        """Cut them from `begin` to `end`, in virtual seconds."""
        self._spans = sorted([*self._spans, (begin, end)])

    def arrival(self, sent: float, arrives: float) -> float:
        """When a message arrives that would, on a whole link, arrive then; at the end of a cut."""
        for begin, end in self._spans:
            if sent < end and begin <= arrives:
                arrives = max(arrives, end)
        return arrives
