"""What goes wrong in a simulated cluster: crashes, preemptions, slowdowns, partitions."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._engine import Slot
from ._arguments import checked_secs
from ._delays import Delay, checked_delay
from ._network import Closures
from ._slowdowns import Slowdowns

if TYPE_CHECKING:
    from ._cluster import Cluster
    from ._worker import Worker


class Failure(ABC):
    """Something that goes wrong, for some workers or all. You make it and give it to a cluster."""

    workers: Collection[int] | None

    def check(self, num_workers: int) -> None:
        """Raise ValueError if it is for workers that are not there."""
        for each in self.workers or ():
            if not 0 <= each < num_workers:
                raise ValueError(f"{self!r} is for worker {each}; give 0 to {num_workers - 1}")

    def concerns(self, worker: int) -> bool:
        """Whether it happens to this worker."""
        return self.workers is None or worker in self.workers

    def prepare(self, worker: Worker) -> None:  # noqa: B027
        """Tell the worker of what is known beforehand."""

    async def play(self, cluster: Cluster, worker: Worker) -> None:  # noqa: B027
        """Let it happen; runs beside the worker, and is cancelled at the end of training."""


@dataclass(frozen=True)
class Crashes(Failure):
    """A worker crashes again and again, and is repaired.

    A crash cancels its program, as the end of a process would: sessions tell their hooks by
    `on_error`. The program begins anew once it is repaired. The parameter server waits for it, as
    for one that will be back.

    Args:
        mtbf: seconds that it works before it crashes, drawn each time.
        repair: seconds until it works again.
        loses_work: whether what it computed is lost; else it goes on with that after the repair,
            and its program notices nothing.
        workers: which of them, by number; None: all, each at times of its own.

    Example:
        failures = [Crashes(mtbf=Exponential(10.0), repair=Exponential(2.0))]
    """

    mtbf: Delay
    repair: Delay
    loses_work: bool = True
    workers: Collection[int] | None = None

    def __post_init__(self) -> None:
        checked_delay("mtbf", self.mtbf)
        checked_delay("repair", self.repair)

    async def play(self, cluster: Cluster, worker: Worker) -> None:
        streams, kernel = cluster.simulation.streams, cluster.kernel
        up = streams.delays(worker.index, "mtbf", self.mtbf)
        down = streams.delays(worker.index, "repair", self.repair)
        while True:
            await kernel.sleep(up.next())
            begun = kernel.time
            if worker.is_finished:
                return
            if self.loses_work:
                await cluster.stop_worker(worker)
            else:
                worker.pause()
            await kernel.sleep(down.next())
            worker.has_been_down(begun)
            if self.loses_work:
                cluster.start_worker(worker)
            else:
                worker.resume()


@dataclass(frozen=True)
class Preemption(Failure):
    """A worker is taken away at a time, for good or for a while; its work in flight is lost.

    Args:
        at: virtual seconds, >= 0.
        secs: seconds until it begins anew; `math.inf`: it has left, and nobody waits for it.
        workers: which of them, by number; None: all.

    Example:
        failures = [Preemption(at=60.0, workers=[3])]
    """

    at: float
    secs: float = math.inf
    workers: Collection[int] | None = None

    def __post_init__(self) -> None:
        _check_time("at", self.at)
        _check_time("secs", self.secs, may_last=True)

    async def play(self, cluster: Cluster, worker: Worker) -> None:
        kernel = cluster.kernel
        await kernel.park(Slot(kernel, "a preemption"), self.at)
        if worker.is_finished:
            return
        begun = kernel.time
        await cluster.stop_worker(worker)
        if self.secs == math.inf:
            cluster.has_left(worker)
            return
        await kernel.sleep(self.secs)
        worker.has_been_down(begun)
        cluster.start_worker(worker)


@dataclass(frozen=True)
class Slowdown(Failure):
    """Work takes `factor` times as long for a while, also what is under way when it begins.

    Args:
        at: virtual seconds, >= 0.
        secs: how long it lasts, seconds.
        factor: >= 1; `math.inf` is a pause.
        workers: which of them, by number; None: all.

    Example:
        failures = [Slowdown(at=10.0, secs=5.0, factor=8.0, workers=[0, 1])]
    """

    at: float
    secs: float
    factor: float
    workers: Collection[int] | None = None

    def __post_init__(self) -> None:
        _check_time("at", self.at)
        _check_time("secs", self.secs, may_last=True)
        if not self.factor >= 1:
            raise ValueError(f"factor is {self.factor!r}; give a number >= 1")
        if math.inf == self.factor == self.secs:
            raise ValueError("a pause that never ends is a Preemption; give one of these")

    def prepare(self, worker: Worker) -> None:
        worker.slowdowns = worker.slowdowns or Slowdowns()
        worker.slowdowns.add(self.at, self.at + self.secs, self.factor)


@dataclass(frozen=True)
class Partition(Failure):
    """Workers are cut off the parameter server for a while: messages arrive when it is over.

    It holds back what is sent over links, so give the cluster `pull` or `push` delays.

    Args:
        at: virtual seconds, >= 0.
        secs: how long it lasts, seconds, finite.
        workers: which of them, by number; None: all.

    Example:
        failures = [Partition(at=10.0, secs=5.0, workers=[0, 1])]
    """

    at: float
    secs: float
    workers: Collection[int] | None = None

    def __post_init__(self) -> None:
        _check_time("at", self.at)
        _check_time("secs", self.secs, may_last=True)
        if self.secs == math.inf:
            raise ValueError("a partition that never ends is a Preemption; give one of these")

    def prepare(self, worker: Worker) -> None:
        worker.closures = worker.closures or Closures()
        worker.closures.add(self.at, self.at + self.secs)


def _check_time(name: str, value: float, *, may_last: bool = False) -> None:
    if not (may_last and value == math.inf):
        checked_secs(name, value)
