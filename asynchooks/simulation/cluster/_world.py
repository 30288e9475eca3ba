"""What surrounds the workers of a cluster: links and servers, or a ring. The cluster makes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._check import instance, integer
from ...protocols import ParameterServer, Protocol, Synchronous
from ..delays._delay import Delay, PerWorker, checked_delay
from ..delays._distributions import Constant
from ..delays._streams import Streams
from ..kernel._kernel import Kernel
from ..output._report import ServerReport
from ..output._timeline import Timeline
from ._host import Checkpoints, ServerHost
from ._network import LinkCuts, Links, Network, Queue
from ._ring import Ring, RingAllReduce

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Surroundings:
    """The options of a cluster that say what surrounds its workers, checked."""

    num_workers: int
    network: Network | RingAllReduce | None
    checkpoints: Checkpoints | None
    num_servers: int
    service: Delay | None
    has_server_crashes: bool

    def check(self, protocol: Protocol, pull: Delay | None, push: Delay | None) -> None:
        """Raise TypeError or ValueError if they do not fit one another."""
        integer("num_servers", self.num_servers, least=1)
        if self.checkpoints is not None:
            expected = "one, as in checkpoints=Checkpoints(every_updates=100), or None"
            instance("checkpoints", self.checkpoints, Checkpoints, expected)
        if self.network is None:
            return
        expected = "a network, as in network=Network(latency=0.01, bandwidth=1e9), or None"
        instance("network", self.network, (Network, RingAllReduce), expected)
        self.network.check(self.num_workers)
        for name, delay in (("pull", pull), ("push", push)):
            if delay is not None:
                raise ValueError(
                    f"got {name}={delay!r} and a network, which says how long messages take; "
                    "give one of the two"
                )
        if isinstance(self.network, RingAllReduce):
            self._check_ring(protocol)

    def _check_ring(self, protocol: Protocol) -> None:
        if not isinstance(protocol, Synchronous):
            raise ValueError(  # noqa: TRY004
                f"RingAllReduce reduces the gradients of all workers at once, got protocol "
                f"{protocol!r}; give protocol=Synchronous()"
            )
        for name, is_given in (
            ("num_servers", self.num_servers > 1),
            ("service", self.service is not None),
            ("failures with ServerCrashes", self.has_server_crashes),
        ):
            if is_given:
                raise ValueError(f"got {name}, but RingAllReduce has no server; leave it out")

    def queues(self, kernel: Kernel, streams: Streams) -> list[Queue]:
        """A queue for each server; none where service takes no time."""
        if self.service is None:
            return []
        return [
            Queue(kernel, streams, self.service, 1, "the server", each)
            for each in range(self.num_servers)
        ]

    def host(
        self,
        kernel: Kernel,
        server: ParameterServer,
        streams: Streams,
        queues: list[Queue],
        timeline: Timeline,
        lose_work: Callable[[], object],
    ) -> ServerHost | None:
        """The machine of the server; None where all that it adds is one queue."""
        if self.checkpoints is None and not self.has_server_crashes and len(queues) <= 1:
            return None
        return ServerHost(kernel, server, streams, self.checkpoints, queues, timeline, lose_work)

    def links(self, kernel: Kernel, streams: Streams, parameters: Any) -> Links | None:
        """The links to the server, if there is a network."""
        if not isinstance(self.network, Network):
            return None
        return Links(self.network, kernel, streams, self.num_workers, self.num_servers, parameters)

    def ring(
        self,
        kernel: Kernel,
        streams: Streams,
        server: ParameterServer,
        link_cuts: Callable[[int], LinkCuts],
    ) -> Ring | None:
        """The ring, if there is one."""
        if not isinstance(self.network, RingAllReduce):
            return None
        return Ring(self.network, kernel, streams, self.num_workers, server, link_cuts)


def server_reports(queues: list[Queue], now: float, secs: float) -> list[ServerReport]:
    """The use of each server up to `now`, `secs` after training began."""
    reports = []
    for place, queue in enumerate(queues):
        busy, queued = queue.secs_after(now)
        secs_busy, secs_queued = queue.secs_busy - busy, queue.secs_queued - queued
        reports.append(ServerReport(
            server=place,
            requests=queue.num_served,
            secs_busy=secs_busy,
            secs_queued=secs_queued,
            busy_share=secs_busy / secs if secs > 0 else 0.0,
            mean_queue=secs_queued / secs if secs > 0 else 0.0,
        ))  # fmt: skip
    return reports


def delay_or_none(name: str, value: Delay | None, num_workers: int) -> Delay | None:
    """The delay of each worker; None if it takes no time at all."""
    delay = None if value is None else delay_of_each(name, value, num_workers)
    return None if delay == Constant(0.0) else delay


def delay_of_each(name: str, value: object, num_workers: int) -> Delay:
    """The delay, if each worker has one; else an error."""
    delay = checked_delay(name, value)
    for worker in range(num_workers if isinstance(delay, PerWorker) else 1):
        try:
            delay.for_worker(worker)
        except ValueError as error:
            error.add_note(f"in {name} of the cluster, which has {num_workers} workers")
            raise
    return delay


def text_of(value: object) -> str:
    """As str, without addresses in memory: the same in each process."""
    return _ADDRESS.sub("", str(value))


def zeros_like(parameters: Any) -> Any:
    """Parameters of zeros, as these are."""
    if isinstance(parameters, dict):
        return {name: np.zeros_like(value) for name, value in parameters.items()}
    return np.zeros_like(parameters)
