"""What goes wrong in a simulated cluster: crashes, preemptions, slowdowns, partitions."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING

from .._engine import Slot
from ._arguments import checked_secs
from ._delays import Constant, Delay, checked_delay
from ._network import Closures
from ._slowdowns import Slowdowns

if TYPE_CHECKING:
    from ._cluster import Cluster
    from ._worker import Worker


class Failure(ABC):
    """Something that goes wrong, for some workers or all. You make it and give it to a cluster."""

    workers: Collection[int] | None

    def check(self, num_workers: int) -> None:
        """Raise TypeError or ValueError if it is for workers that are not there."""
        if self.workers is None:
            return
        allowed = f"give numbers from 0 to {num_workers - 1}, as in workers=[0], or None for all"
        if isinstance(self.workers, str) or not isinstance(self.workers, Collection):
            raise TypeError(f"workers of {self!r} is {self.workers!r}; {allowed}")
        for each in self.workers:
            if isinstance(each, bool) or not isinstance(each, Integral):
                raise TypeError(f"{self!r} is for worker {each!r}; {allowed}")
            if not 0 <= each < num_workers:
                raise ValueError(f"{self!r} is for worker {each}; {allowed}")

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
        if checked_delay("mtbf", self.mtbf) == Constant(0.0):
            raise ValueError("mtbf is Constant(0.0), with which it never works; give seconds > 0")
        checked_delay("repair", self.repair)

    async def play(self, cluster: Cluster, worker: Worker) -> None:
        streams, kernel = cluster.streams, cluster.kernel
        # several of them crash one worker at times of their own
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
class Preemption(Failure):
    """A worker is taken away at a time, for good or for a while; its work in flight is lost.

    Args:
        at: virtual seconds, >= 0; if training begins only after that, it is preempted at once.
        secs: seconds from `at` until it begins anew; `math.inf`: it has left, and nobody waits
            for it.
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
        ends = self.at + self.secs
        if ends <= kernel.time:  # before training began
            return
        await kernel.sleep(max(0.0, self.at - kernel.time))
        if worker.is_finished:
            return
        await cluster.take_down(worker)
        if ends == math.inf:
            cluster.let_go(worker)
            return
        await kernel.park(Slot(kernel, "the end of a preemption"), max(ends, kernel.time))
        cluster.bring_back(worker)


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
        allowed = "a number >= 1, or math.inf for a pause"
        if isinstance(self.factor, bool) or not isinstance(self.factor, Real):
            raise TypeError(f"factor is {self.factor!r}; give {allowed}")
        if not self.factor >= 1:
            raise ValueError(f"factor is {self.factor!r}; give {allowed}")
        if math.inf == self.factor == self.secs:
            raise ValueError("a pause that never ends is a Preemption; give one of these")

    def prepare(self, worker: Worker) -> None:
        worker.slowdowns = worker.slowdowns or Slowdowns()
        worker.slowdowns.add(self.at, self.at + self.secs, self.factor)


@dataclass(frozen=True)
class Partition(Failure):
    """Workers are cut off the parameter server for a while: messages arrive when it is over.

    So do those that are under way when it begins. What is pulled while it lasts is as it is at its
    end: what was asked for has not arrived before.

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


def checked_failures(failures: object, num_workers: int) -> list[Failure]:
    """The failures, if they are such, of workers that are there."""
    if isinstance(failures, str) or not isinstance(failures, Sequence):
        raise TypeError(f"failures is {failures!r}; give a list, as in failures=[Preemption(60.0)]")
    found: list[Failure] = []
    for each in failures:
        if not isinstance(each, Failure):
            raise TypeError(f"failures hold {each!r}; give Crashes, Preemption or another")
        each.check(num_workers)
        # random numbers go by which of them it is: one that is given twice would happen once
        found.append(copy(each) if any(each is other for other in found) else each)
    return found


def _check_time(name: str, value: float, *, may_last: bool = False) -> None:
    if not (may_last and value == math.inf):
        checked_secs(name, value)
