"""Failures of simulated workers: crashes, preemptions, slowdowns, partitions."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

from ..._check import number
from ..._engine.base import Slot
from ..delays._delay import Delay, checked_delay, checked_secs
from ..delays._distributions import Constant
from ._cluster import Cluster, Failure
from ._worker import Worker


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
    repeats_for_ever: ClassVar[bool] = True

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
            cluster.check_standstill(worker)
            await cluster.take_down(worker, loses_work=self.loses_work)
            await kernel.sleep(down.next())
            cluster.bring_back(worker, loses_work=self.loses_work)


@dataclass(frozen=True)
class ServerCrashes(Failure):
    """The parameter server crashes again and again, and is repaired.

    A crash undoes every update since the last durable checkpoint (see `Checkpoints`), or since
    the begin where there is none. It also loses what is under way: computations, and gradients on
    their way, which are discarded. Workers wait until the server is up, and pull again. After the
    repair it loads the checkpoint. Where crashes come faster than checkpoints, the same updates are
    made and undone for ever; give `run` an `until` there. `workers` is None, as it hits none of
    them.

    Args:
        mtbf: mean time between failures: seconds from its begin, or from the end of a restart, to
            the next crash, drawn each time.
        repair: seconds until it loads the checkpoint.

    Raises:
        TypeError, ValueError: one is no delay, or `mtbf` is Constant(0.0).

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        failures = [ServerCrashes(mtbf=Constant(2.5), repair=Constant(0.5))]
        checkpoints = Checkpoints(every_updates=2)
        cluster = simulation.cluster(
            1, compute=Constant(1.0), checkpoints=checkpoints, failures=failures
        )
        assert cluster.run(updates=3).secs_undone == 0.5
    """

    mtbf: Delay
    repair: Delay
    workers: None = field(default=None, init=False, repr=False)
    repeats_for_ever: ClassVar[bool] = True
    is_of_server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if checked_delay("mtbf", self.mtbf) == Constant(0.0):
            raise ValueError("mtbf is Constant(0.0), with which it never works; give seconds > 0")
        checked_delay("repair", self.repair)

    async def play_on_server(self, cluster: Cluster) -> None:
        streams, kernel, host = cluster.streams, cluster.kernel, cluster.host
        assert host is not None
        place = next(i for i, each in enumerate(cluster.failures) if each is self)
        up = streams.delays(0, f"mtbf of server failure {place}", self.mtbf)
        down = streams.delays(0, f"repair of server failure {place}", self.repair)
        while True:
            await kernel.sleep(up.next())
            if cluster.server.is_over:
                return
            cluster.check_standstill_of_server()
            host.crash()
            await kernel.sleep(down.next())
            await kernel.sleep(host.restore_secs())
            host.come_up()


@dataclass(frozen=True)
class Preemption(Failure):
    """A worker is preempted at a time, for good or for a while; its work in flight is lost.

    Args:
        at: virtual seconds, >= 0; if training begins later than that, it is preempted at once.
        secs: seconds from `at` until it begins again; `math.inf`: it leaves, and no other worker
            waits for it.
        workers: which of them, by number; None: all.

    Example:
        failures = [Preemption(at=60.0, workers=[3])]
    """

    at: float
    secs: float = math.inf
    workers: Collection[int] | None = None

    def __post_init__(self) -> None:
        _check_span(self.at, self.secs)

    async def play(self, cluster: Cluster, worker: Worker) -> None:
        kernel = cluster.kernel
        at, secs = float(self.at), float(self.secs)  # of NumPy, too
        ends = at + secs
        if ends <= kernel.time:  # before training began
            return
        await kernel.sleep(max(0.0, at - kernel.time))
        if worker.is_finished:
            return
        await cluster.take_down(worker)
        if ends == math.inf:
            cluster.retire(worker)
            return
        await kernel.park(Slot(kernel, "the end of a preemption"), max(ends, kernel.time))
        cluster.bring_back(worker)


@dataclass(frozen=True)
class Slowdown(Failure):
    """Work takes `factor` times as long for a while, including work under way when it begins.

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
        _check_span(self.at, self.secs)
        allowed = "a number >= 1, or math.inf for a pause"
        number("factor", self.factor, least=1, finite=False, expected=allowed)
        if math.inf == self.factor == self.secs:
            raise ValueError("a pause that never ends is a Preemption; give one of these")

    def prepare(self, worker: Worker) -> None:
        at, secs, factor = float(self.at), float(self.secs), float(self.factor)
        worker.slowdowns += ((at, at + secs, factor),)


@dataclass(frozen=True)
class Partition(Failure):
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

    at: float
    secs: float
    workers: Collection[int] | None = None

    def __post_init__(self) -> None:
        _check_span(self.at, self.secs)
        if self.secs == math.inf:
            raise ValueError("a partition that never ends is a Preemption; give one of these")

    def prepare(self, worker: Worker) -> None:
        worker.link_cuts += ((float(self.at), float(self.at) + float(self.secs)),)


def _check_span(at: float, secs: float) -> None:
    checked_secs("at", at)
    if secs != math.inf:
        checked_secs("secs", secs)
