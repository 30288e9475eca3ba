"""Times of messages: a queue in front of a server, links with latency and bandwidth, cut links."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._check import a_number, integer, number
from ..._engine.base import Slot
from ..delays._delay import Delay, PerWorker, checked_delay, checked_secs
from ..delays._distributions import Constant
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

    def __init__(
        self,
        kernel: Kernel,
        streams: Streams,
        service: Delay,
        num_servers: int,
        name: str,
        index: int = 0,  # among those of one name
    ) -> None:
        self._kernel = kernel
        self._service: DelayStream = streams.delays(index, f"service of {name}", service)
        self._free_at = [0.0] * integer("num_servers", num_servers, least=1)
        self._begins: deque[float] = deque()  # when it is the turn of those that wait
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
        kernel = self._kernel
        asked, ends = kernel.time, self.enter()
        await kernel.park(Slot(kernel, "its turn at the server"), ends)
        return ends - asked

    def enter(self) -> float:
        """Take a request; returns when it will have been served, in virtual seconds."""
        asked, free_at = self._kernel.time, self._free_at
        begins = max(asked, free_at[0])
        ends = begins + self._service.next()
        heapq.heapreplace(free_at, ends)
        self.num_served += 1
        self.secs_busy += ends - begins
        if begins > asked:
            self.secs_queued += begins - asked
            waiting = self._begins
            while waiting and waiting[0] <= asked:
                waiting.popleft()
            waiting.append(begins)
        return ends

    def secs_after(self, now: float) -> tuple[float, float]:
        """What `secs_busy` and `secs_queued` hold of the time after `now`."""
        busy = math.fsum(each - now for each in self._free_at if each > now)
        return busy, math.fsum(each - now for each in self._begins if each > now)


Bandwidth = float | Sequence[float] | None
"""Bytes per second, for all workers or for each; None: no limit."""


@dataclass(frozen=True)
class Network:
    """The links between the workers and the parameter server, for `Simulation.cluster`.

    A pull is a request, which takes the latency, and a reply of `parameter_bytes`; a push is one
    message of `gradient_bytes`. A message takes its bytes over the bandwidth, and then the latency.
    Messages that need the server's bandwidth in one direction at the same time pass one after the
    other, in the order in which they were sent; each takes as long as the slower of the two links.
    With several servers each has such a link for its part of a message, and a latency of its own:
    the message arrives when its last part does.

    Args:
        latency: seconds, or a delay, drawn for each message and server.
        bandwidth: bytes per second of a worker's link in each direction, > 0; a sequence has one
            for each worker; None: no limit.
        server_bandwidth: bytes per second of each server's link in each direction, > 0; None: no
            limit.
        parameter_bytes: of what a pull brings, >= 0; None: the size of the cluster's parameters.
        gradient_bytes: of what a push sends, >= 0; None: as `parameter_bytes`.

    Raises:
        TypeError, ValueError: an argument is no such number or delay.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        network = Network(latency=0.25, bandwidth=1e6, parameter_bytes=500_000)
        cluster = simulation.cluster(1, compute=Constant(1.0), network=network)
        assert cluster.run(updates=1).secs == 0.25 + 0.75 + 1.0 + 0.75
    """

    latency: Delay | float = 0.0
    bandwidth: Bandwidth = None
    server_bandwidth: float | None = None
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None

    def __post_init__(self) -> None:
        self._latency()
        if isinstance(self.bandwidth, Sequence) and not isinstance(self.bandwidth, str):
            for place, each in enumerate(self.bandwidth):
                _positive(f"bandwidth[{place}]", each)
        elif self.bandwidth is not None:
            _positive("bandwidth", self.bandwidth, ", or a list with one for each worker")
        if self.server_bandwidth is not None:
            _positive("server_bandwidth", self.server_bandwidth)
        for name in ("parameter_bytes", "gradient_bytes"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), least=0)

    def check(self, num_workers: int) -> None:
        """Raise ValueError if it does not fit that many workers."""
        if isinstance(self.bandwidth, Sequence) and len(self.bandwidth) != num_workers:
            raise ValueError(
                f"bandwidth of the network has {len(self.bandwidth)} values for {num_workers} "
                "workers; give one for each, or one number for all"
            )
        delay_of_each("latency", self._latency(), num_workers, "network")

    def messages(
        self, kernel: Kernel, streams: Streams, num_workers: int, num_servers: int, parameters: Any
    ) -> list[tuple[Message, Message, Message]]:
        """The request, the download and the upload of each worker."""
        own = size_of(parameters) if self.parameter_bytes is None else self.parameter_bytes
        upload = own if self.gradient_bytes is None else self.gradient_bytes
        out, into = None, None
        if self.server_bandwidth is not None:
            # the parts of a message move alike on each server's link, so one stands for all
            total = float(self.server_bandwidth) * num_servers
            out, into = (
                Queue(kernel, streams, Constant(size / total), 1, f"the server's link {way}")
                for way, size in (("out", own), ("in", upload))
            )
        messages = []
        for worker in range(num_workers):
            latency = streams.delays(worker, "latency", self._latency())
            given = self.bandwidth
            bandwidth = given[worker] if isinstance(given, Sequence) else given or math.inf
            messages.append(
                (
                    Message(latency, num_draws=num_servers),
                    Message(latency, own, float(bandwidth), out, num_draws=num_servers),
                    Message(latency, upload, float(bandwidth), into, num_draws=num_servers),
                )
            )
        return messages

    def _latency(self) -> Delay:
        if a_number(self.latency):
            return Constant(checked_secs("latency", self.latency))
        return checked_delay("latency", self.latency)


class Message:
    """What a worker's messages of one kind take: their bytes over the links, and then a delay."""

    __slots__ = ("_delay", "_link", "_num_draws", "_secs", "num_bytes")

    def __init__(
        self,
        delay: DelayStream,
        num_bytes: int = 0,
        bandwidth: float = math.inf,
        link: Queue | None = None,  # the server's
        num_draws: int = 1,  # of the delay, of which the longest counts
    ) -> None:
        self._delay = delay
        self._link = link
        self._num_draws = num_draws
        self._secs = num_bytes / bandwidth
        self.num_bytes = num_bytes

    def arrival(self, now: float) -> float:
        """When one arrives that is sent now."""
        arrives = now + self._secs
        if self._link is not None:
            arrives = max(arrives, self._link.enter())
        return arrives + max([self._delay.next() for _ in range(self._num_draws)])


LinkCuts = tuple[tuple[float, float], ...]
"""(Begin, end) of each span of virtual seconds in which no message arrives."""


def arrival(cuts: LinkCuts, sent: float, arrives: float) -> float:
    """When a message really arrives, given when it would without cuts."""
    for begin, end in sorted(cuts):
        if sent < end and begin <= arrives:
            arrives = max(arrives, end)
    return arrives


def size_of(parameters: Any) -> int:
    """Bytes of parameters, which are an array or a mapping of arrays."""
    values = parameters.values() if isinstance(parameters, dict) else [parameters]
    return sum(np.asarray(each).nbytes for each in values)


def delay_of_each(name: str, value: object, num: int, whole: str = "cluster") -> Delay:
    """The delay, if each worker has one; else an error."""
    delay = checked_delay(name, value)
    for worker in range(num if isinstance(delay, PerWorker) else 1):
        try:
            delay.for_worker(worker)
        except ValueError as error:
            error.add_note(f"in {name} of the {whole}, which has {num} workers")
            raise
    return delay


def _positive(name: str, value: object, otherwise: str = "") -> None:
    expected = f"bytes per second, > 0, or None for no limit{otherwise}"
    number(name, value, above=0.0, expected=expected)
