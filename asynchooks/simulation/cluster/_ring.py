"""A ring of workers that reduce their gradients without a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..._check import integer
from ..._engine.base import TIMED_OUT, Slot
from ...protocols import ParameterServer
from ..delays._delay import Delay
from ..delays._distributions import Constant
from ..delays._streams import Streams
from ..kernel._kernel import Kernel
from ._network import (
    Bandwidth,
    LinkCuts,
    arrival,
    bandwidths_of,
    check_bandwidth,
    check_links,
    checked_latency,
    latencies_of,
    size_of,
)


@dataclass(frozen=True)
class RingAllReduce:
    """Workers in a ring that sum their gradients without a server, the synchronous baseline.

    Give it to `Simulation.cluster` as `network`, with the protocol `Synchronous()`. It begins when
    the last worker is ready. P workers pass on chunks of 1/P of the gradient in 2(P - 1) rounds; a
    chunk takes its bytes over the bandwidth of the sender's link, and then the latency; a worker
    sends its next chunk once the one before has arrived and that of its predecessor is there. So
    constant links take 2(P - 1) times as long as a chunk on the slowest. Then each worker has the
    new parameters, and a pull takes no time.

    A worker that crashes meanwhile ends the reduction; it begins again when all are ready again.

    Args:
        latency: seconds, or a delay, drawn for each chunk.
        bandwidth: bytes per second of a worker's link to its successor, > 0; a sequence has one
            for each worker; None: no limit.
        gradient_bytes: >= 0; None: the size of the cluster's parameters.

    Raises:
        TypeError, ValueError: an argument is no such number or delay.

    Source: Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations".

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        ring = RingAllReduce(latency=0.125, bandwidth=1e6, gradient_bytes=1_000_000)
        cluster = simulation.cluster(
            4, protocol=Synchronous(), compute=Constant(1.0), network=ring
        )
        assert cluster.run(updates=1).secs == 1.0 + 2 * 3 * (0.125 + 0.25)
    """

    latency: Delay | float = 0.0
    bandwidth: Bandwidth = None
    gradient_bytes: int | None = None

    def __post_init__(self) -> None:
        checked_latency(self.latency)
        check_bandwidth(self.bandwidth)
        if self.gradient_bytes is not None:
            integer("gradient_bytes", self.gradient_bytes, least=0)

    def check(self, num_workers: int) -> None:
        """Raise ValueError if it does not fit that many workers."""
        check_links(self.latency, self.bandwidth, num_workers)


class Ring:
    """The reductions of a `RingAllReduce` while a cluster trains, which makes it.

    A worker awaits `until_all_are_ready` and then `reduce`; where that returns False, both again.
    """

    def __init__(
        self,
        ring: RingAllReduce,
        kernel: Kernel,
        streams: Streams,
        num_workers: int,
        server: ParameterServer,
        link_cuts: Callable[[int], LinkCuts],
    ) -> None:
        self._kernel = kernel
        self._latencies = latencies_of(ring.latency, streams, num_workers)
        self._bandwidths = bandwidths_of(ring.bandwidth, num_workers)
        own = ring.gradient_bytes
        self._num_bytes = size_of(server.parameters) if own is None else own
        self._server = server
        self._link_cuts = link_cuts
        self._ready: dict[int, Slot] = {}
        self._reducing: dict[int, Slot] = {}
        self._ends_at = self._bytes_each = 0.0
        self.bytes_moved = 0.0
        """Over all links, in reductions that were finished."""

    async def until_all_are_ready(self, worker: int) -> None:
        """Wait until every worker that is present has a gradient."""
        slot = self._ready[worker] = Slot(self._kernel, "the gradients of all workers")
        self.begin_if_ready()
        try:
            await self._kernel.park(slot)
        except BaseException:  # it is cancelled, perhaps after it was woken
            self._ready.pop(worker, None)
            self._end_without(worker)
            raise

    async def reduce(self, worker: int) -> bool:
        """Wait for the end of the reduction; False if a crash of another worker has ended it."""
        slot = self._reducing.get(worker)
        if slot is None:
            return False
        try:
            value = await self._kernel.park(slot, self._ends_at)
        except BaseException:
            self._end_without(worker)
            raise
        if value is not TIMED_OUT:
            return False
        self.bytes_moved += self._bytes_each
        del self._reducing[worker]
        return True

    def _end_without(self, worker: int) -> None:
        """End the reduction, if there is one, without this worker."""
        if worker in self._reducing:
            del self._reducing[worker]
            reducing, self._reducing = self._reducing, {}
            for slot in reducing.values():
                slot.wake()

    def begin_if_ready(self) -> None:
        """Begin if every worker that is present is ready: also after one has left."""
        ready = self._ready
        if not ready or len(ready) < self._server.num_present:
            return
        kernel, workers = self._kernel, sorted(ready)
        begun = kernel.time
        self._ends_at = begun + self._secs(workers)
        for worker in workers:
            self._ends_at = arrival(self._link_cuts(worker), begun, self._ends_at)
        self._bytes_each = 2 * (len(workers) - 1) * self._num_bytes / len(workers)
        self._ready = {}
        for worker in workers:
            self._reducing[worker] = Slot(kernel, "a ring all-reduce")
            ready[worker].wake()

    def _secs(self, workers: list[int]) -> float:
        num = len(workers)
        num_rounds, chunk = 2 * (num - 1), self._num_bytes / num
        moves = [chunk / self._bandwidths[each] for each in workers]
        streams = [self._latencies[each] for each in workers]
        if all(type(each.delay) is Constant for each in streams):
            slowest = max(move + each.next() for move, each in zip(moves, streams, strict=True))
            return num_rounds * slowest
        now = self._kernel.time
        ends = [0.0] * num  # of what each has sent; the worker before the first is the last
        for _ in range(num_rounds):
            begins = [max(ends[i], ends[i - 1]) for i in range(num)]
            ends = [
                begin + move + each.delay.stretch(now + begin + move, each.next())
                for begin, move, each in zip(begins, moves, streams, strict=True)
            ]
        return max(ends)
