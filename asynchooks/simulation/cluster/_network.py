"""Times of messages: a queue in front of a server, links with latency and bandwidth, cut links."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._check import a_number, integer, number
from ..._engine.base import Slot
from ..delays._delay import Delay, checked_delay, checked_secs
from ..delays._distributions import Constant
from ..delays._streams import DelayStream, Streams
from ..kernel._kernel import Call, Kernel


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

    __slots__ = (
        "_begins", "_free_at", "_kernel", "_service", "num_served", "secs_busy", "secs_queued",
    )  # fmt: skip

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
        ends = begins + self._service.delay.stretch(begins, self._service.next())
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

    def clear(self) -> None:
        """Drop every request that is not done: their tasks must be woken."""
        now = self._kernel.time
        busy, queued = self.secs_after(now)
        self.secs_busy -= busy
        self.secs_queued -= queued
        self._begins.clear()
        self._free_at = [now] * len(self._free_at)


Bandwidth = float | Sequence[float] | None
"""Bytes per second, for all workers or for each; None: no limit."""


@dataclass(frozen=True)
class Network:
    """The links between the workers and the parameter server, for `Simulation.cluster`.

    A pull is a request, which takes the latency, and a reply of `parameter_bytes`; a push is one
    message of `gradient_bytes`. A message takes its bytes over the bandwidth, and then the latency.
    What moves at the same time in one direction shares the server's bandwidth, as flows of TCP
    do: each gets an equal share, at most what its worker's link takes, and what one cannot use
    goes to the others. With several servers each has such a link, and a latency of its own for each
    message, which arrives when its last part does.

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
        checked_latency(self.latency)
        check_bandwidth(self.bandwidth)
        if self.server_bandwidth is not None:
            _positive("server_bandwidth", self.server_bandwidth)
        for name in ("parameter_bytes", "gradient_bytes"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), least=0)

    def check(self, num_workers: int) -> None:
        """Raise ValueError if it does not fit that many workers."""
        check_links(self.latency, self.bandwidth, num_workers)


class Links:
    """The links of a `Network` while a cluster trains, which makes it."""

    def __init__(
        self,
        network: Network,
        kernel: Kernel,
        streams: Streams,
        num_workers: int,
        num_servers: int,
        parameters: Any,
    ) -> None:
        self._kernel = kernel
        self._latencies = latencies_of(network.latency, streams, num_workers)
        self._bandwidths = bandwidths_of(network.bandwidth, num_workers)
        self._num_servers = num_servers
        own = size_of(parameters) if network.parameter_bytes is None else network.parameter_bytes
        self._parameter_bytes = own
        self._gradient_bytes = own if network.gradient_bytes is None else network.gradient_bytes
        # parts of a message move alike on each server's link, so one stands for all
        capacity = network.server_bandwidth
        total = None if capacity is None else float(capacity) * num_servers
        self._in = None if total is None else SharedLink(kernel, total)
        self._out = None if total is None else SharedLink(kernel, total)
        self.bytes_moved = 0
        """Of messages that have arrived."""

    async def request(self, worker: int) -> None:
        """Wait until the request of a pull arrives."""
        await self._move(worker, 0, None)

    async def download(self, worker: int) -> None:
        """Wait until the parameters arrive."""
        await self._move(worker, self._parameter_bytes, self._out)

    async def upload(self, worker: int) -> None:
        """Wait until a gradient arrives."""
        await self._move(worker, self._gradient_bytes, self._in)

    async def _move(self, worker: int, num_bytes: int, link: SharedLink | None) -> None:
        kernel, bandwidth = self._kernel, self._bandwidths[worker]
        if link is not None and num_bytes:
            await link.transfer(num_bytes, bandwidth)
            arrives = kernel.time
        else:
            arrives = kernel.time + num_bytes / bandwidth
        stream = self._latencies[worker]
        latency = max(stream.next() for _ in range(self._num_servers))
        arrives += stream.delay.stretch(arrives, latency)
        if arrives > kernel.time:
            await kernel.park(Slot(kernel, "a message"), arrives)
        self.bytes_moved += num_bytes


class SharedLink:
    """A link whose bandwidth all transfers under way share, up to the limit of each.

    Transfers of one limit get the same rate, so one sum of bytes stands for all of them: a transfer
    costs O(log n), and O(limits).
    """

    def __init__(self, kernel: Kernel, bandwidth: float) -> None:
        self._kernel = kernel
        self._bandwidth = bandwidth
        self._groups: dict[float, _Group] = {}  # by limit, from the lowest
        self._since = 0.0  # when the sums were brought up to date
        self._order = itertools.count()
        self._next: Call | None = None
        self._due: list[tuple[_Group, float]] = []  # what ends then, and its sum

    async def transfer(self, num_bytes: float, limit: float) -> None:
        """Wait until so many bytes have passed; a transfer that is cancelled leaves the link."""
        self._advance()
        if limit not in self._groups:
            self._groups[limit] = _Group()
            self._groups = dict(sorted(self._groups.items()))
        group = self._groups[limit]
        slot = Slot(self._kernel, "a transfer")
        flow = _Flow(slot)
        heapq.heappush(group.flows, (group.sent + num_bytes, next(self._order), flow))
        group.num += 1
        self._schedule()
        try:
            await self._kernel.park(slot)
        finally:
            if not flow.is_over:
                flow.is_over = True
                self._advance()
                group.num -= 1
                self._schedule()

    def _advance(self) -> None:
        now = self._kernel.time
        if now > self._since:
            for each in self._groups.values():
                each.sent += each.rate * (now - self._since)
        self._since = now

    def _schedule(self) -> None:
        """Share the bandwidth, and wait for the next end of a transfer."""
        if self._next is not None and self._next.due:
            self._kernel.forget(self._next)
        self._next, self._due = None, []
        self._groups = {limit: each for limit, each in self._groups.items() if each.num}
        left, num = self._bandwidth, sum(each.num for each in self._groups.values())
        soonest = math.inf
        for limit, group in self._groups.items():
            group.rate = min(limit, left / num)
            left -= group.rate * group.num
            num -= group.num
            while group.flows[0][2].is_over:
                heapq.heappop(group.flows)
            end = group.flows[0][0]
            secs = max(0.0, (end - group.sent) / group.rate)
            if secs < soonest:
                soonest, self._due = secs, []
            if secs == soonest:
                self._due.append((group, end))
        if self._due:
            self._next = Call(self._finish, "the end of a transfer")
            self._kernel.push(self._since + soonest, self._next)

    def _finish(self) -> None:
        self._advance()
        for group, end in self._due:
            group.sent = end  # exactly, where a sum of products is rounded
            while group.flows and (group.flows[0][2].is_over or group.flows[0][0] <= end):
                flow = heapq.heappop(group.flows)[2]
                if not flow.is_over:
                    flow.is_over = True
                    group.num -= 1
                    flow.slot.wake()
        self._schedule()


class _Group:
    """Transfers with one limit."""

    __slots__ = ("flows", "num", "rate", "sent")

    def __init__(self) -> None:
        self.sent = 0.0  # bytes that one that is here since its begin has sent
        self.rate = 0.0  # of each, bytes per second
        self.num = 0  # under way
        self.flows: list[tuple[float, int, _Flow]] = []  # by the sum at which they end


class _Flow:
    __slots__ = ("is_over", "slot")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.is_over = False


LinkCuts = tuple[tuple[float, float], ...]
"""(Begin, end) of each span of virtual seconds in which no message arrives."""


def arrival(cuts: LinkCuts, sent: float, arrives: float) -> float:
    """When a message really arrives, given when it would without cuts."""
    for begin, end in sorted(cuts):
        if sent < end and begin <= arrives:
            arrives = max(arrives, end)
    return arrives


def latencies_of(latency: Delay | float, streams: Streams, num_workers: int) -> list[DelayStream]:
    """The latencies of each worker's link."""
    delay = checked_latency(latency)
    return [streams.delays(worker, "latency", delay) for worker in range(num_workers)]


def bandwidths_of(bandwidth: Bandwidth, num_workers: int) -> list[float]:
    """The bandwidth of each worker's link; infinite where there is no limit."""
    if isinstance(bandwidth, Sequence):
        return [float(each) for each in bandwidth]
    return [math.inf if bandwidth is None else float(bandwidth)] * num_workers


def size_of(parameters: Any) -> int:
    """Bytes of parameters, which are an array or a mapping of arrays."""
    values = parameters.values() if isinstance(parameters, dict) else [parameters]
    return sum(np.asarray(each).nbytes for each in values)


def check_links(latency: Delay | float, bandwidth: Bandwidth, num_workers: int) -> None:
    """Raise ValueError if there is not one for each worker."""
    delay = checked_latency(latency)
    if isinstance(bandwidth, Sequence) and len(bandwidth) != num_workers:
        raise ValueError(
            f"bandwidth of the network has {len(bandwidth)} values for {num_workers} workers; "
            "give one for each, or one number for all"
        )
    for worker in range(num_workers):
        try:
            delay.for_worker(worker)
        except ValueError as error:
            error.add_note(f"in latency of the network, which has {num_workers} workers")
            raise


def checked_latency(latency: object) -> Delay:
    if a_number(latency):
        return Constant(checked_secs("latency", latency))
    return checked_delay("latency", latency)


def check_bandwidth(value: object) -> None:
    """Raise TypeError or ValueError if it is no bandwidth, nor one for each worker."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        for i, each in enumerate(value):
            _positive(f"bandwidth[{i}]", each)
    elif value is not None:
        _positive("bandwidth", value, ", or a list with one for each worker")


def _positive(name: str, value: object, otherwise: str = "") -> None:
    expected = f"bytes per second, > 0, or None for no limit{otherwise}"
    number(name, value, above=0.0, expected=expected)
