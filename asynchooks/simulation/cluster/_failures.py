"""Failures of simulated workers: crashes, preemptions, slowdowns, partitions."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ..._check import number
from ..._engine.base import Slot
from ..delays._delay import Delay, checked_delay, checked_secs
from ..delays._distributions import Constant
from ._cluster import Cluster, Failure, Worker


@dataclass(frozen=True)
class Crashes(Failure):
    """A worker crashes again and again, and is repaired.

    A crash cancels its program, as the end of a process would: hooks of sessions get `on_error`.
    The program begins again once the worker is repaired; the parameter server waits for it.

    Args:
        mtbf: mean time between failures: seconds of work before a crash, drawn each time.
        repair: seconds until it works again.
        loses_work: whether its computation is lost; else it continues after the repair, and its
            program notices nothing.
        workers: which of them, by number; None: all, each at times of its own.

    Example:
        failures = [Crashes(mtbf=Exponential(10.0), repair=Exponential(2.0))]
    """

    mtbf: Delay
    repair: Delay
    loses_work: bool = True
    workers: Collection[int] | None = None

    def __post_init__(self) -> None:
        if checked_delay("mtbf", self.mtbf) == Constant(0.0):
            raise ValueError("mtbf is Constant(0.0), with which it never works; give seconds > 0")
        checked_delay("repair", self.repair)

    async def play(self, cluster: Cluster, worker: Worker) -> None:
        streams, kernel = cluster.streams, cluster.kernel
        # several Crashes of one worker draw separate times
        place = next(i for i, each in enumerate(cluster.failures) if each is self)
        up = streams.delays(worker.index, f"mtbf of failure {place}", self.mtbf)
        down = streams.delays(worker.index, f"repair of failure {place}", self.repair)
        while True:
            await kernel.sleep(up.next())
            if worker.is_finished:
                return
            await cluster.take_down(worker, loses_work=self.loses_work)
            await kernel.sleep(down.next())
            cluster.bring_back(worker, loses_work=self.loses_work)


@dataclass(frozen=True)
class _Once(Failure):
    """A failure from one time to another."""

    at: float
    secs: float

    def __post_init__(self) -> None:
        checked_secs("at", self.at)
        if self.secs != math.inf:
            checked_secs("secs", self.secs)

    @property
    def end(self) -> float:
        return float(self.at) + float(self.secs)  # of NumPy, too

    async def play(self, cluster: Cluster, worker: Worker) -> None:
        kernel = cluster.kernel
        if self.end <= kernel.time:  # before training began
            return
        await kernel.sleep(max(0.0, float(self.at) - kernel.time))
        if worker.is_finished:
            return
        await self.begin(cluster, worker)
        if self.end < math.inf:
            slot = Slot(kernel, f"the end of a {type(self).__name__}")
            await kernel.park(slot, max(self.end, kernel.time))
            self.finish(cluster, worker)

    async def begin(self, cluster: Cluster, worker: Worker) -> None:
        raise NotImplementedError

    def finish(self, cluster: Cluster, worker: Worker) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Preemption(_Once):
    """A worker is preempted at a time, for good or for a while; its work in flight is lost.

    Args:
        at: virtual seconds, >= 0; if training begins later than that, it is preempted at once.
        secs: seconds from `at` until it begins again; `math.inf`: it leaves, and no other worker
            waits for it.
        workers: which of them, by number; None: all.

    Example:
        failures = [Preemption(at=60.0, workers=[3])]
    """

    secs: float = math.inf
    workers: Collection[int] | None = None

    async def begin(self, cluster: Cluster, worker: Worker) -> None:
        await cluster.take_down(worker)
        if self.end == math.inf:
            cluster.retire(worker)

    def finish(self, cluster: Cluster, worker: Worker) -> None:
        cluster.bring_back(worker)


@dataclass(frozen=True)
class Slowdown(_Once):
    """Work takes `factor` times as long for a while, including work under way when it begins.

    Args:
        at: virtual seconds, >= 0.
        secs: how long it lasts, seconds.
        factor: >= 1; `math.inf` is a pause.
        workers: which of them, by number; None: all.

    Example:
        failures = [Slowdown(at=10.0, secs=5.0, factor=8.0, workers=[0, 1])]
    """

    factor: float
    workers: Collection[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = "a number >= 1, or math.inf for a pause"
        number("factor", self.factor, least=1, finite=False, expected=allowed)
        if math.inf == self.factor == self.secs:
            raise ValueError("a pause that never ends is a Preemption; give one of these")

    async def begin(self, cluster: Cluster, worker: Worker) -> None:
        worker.factors.append(float(self.factor))
        worker.change_speed()

    def finish(self, cluster: Cluster, worker: Worker) -> None:
        worker.factors.remove(float(self.factor))
        worker.change_speed()


@dataclass(frozen=True)
class Partition(_Once):
    """Workers are cut off from the parameter server for a while: messages arrive at its end.

    This includes messages under way when it begins. A pull gets the parameters as they are at the
    end, when its request arrives.

    Args:
        at: virtual seconds, >= 0.
        secs: how long it lasts, seconds, finite.
        workers: which of them, by number; None: all.

    Example:
        failures = [Partition(at=10.0, secs=5.0, workers=[0, 1])]
    """

    workers: Collection[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.secs == math.inf:
            raise ValueError("a partition that never ends is a Preemption; give one of these")

    def prepare(self, worker: Worker) -> None:
        worker.link_cuts += ((float(self.at), self.end),)

    async def play(self, cluster: Cluster, worker: Worker) -> None:
        """Nothing happens at its times: each message asks when it arrives."""
