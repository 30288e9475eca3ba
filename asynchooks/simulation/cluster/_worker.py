"""One worker of a simulated cluster: it pulls parameters, spends time, and pushes gradients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Protocol

import numpy as np

from ..._engine.base import TIMED_OUT, Sentinel, Slot
from ..._engine.threads import StepRunnerName
from ..._hook import SessionRunHook
from ..._session import MonitoredSession
from ..._step.global_step import GlobalStep
from ..._stopping.backoff import Recovery
from ...backends._function import FunctionSessionCreator
from ...hooks import StopAtStepHook
from ...protocols import ParameterServer, ProtocolHook, Pushed, Snapshot
from ..delays._delay import Delay, checked_secs
from ..delays._phases import Slowdowns, stretched, work_done
from ..delays._streams import DelayStream, Streams
from ..kernel._kernel import Kernel, KernelTask, Until
from ..output._timeline import Push, TimeAccount, Timeline
from ._host import ServerHost
from ._network import LinkCuts, Links, Queue, arrival
from ._ring import Ring

_PAUSED = Sentinel("PAUSED")
_LOST = Sentinel("LOST")


class SimulationView(Protocol):
    """What a cluster and the programs of its workers use of their `Simulation`."""

    seed: int

    @property
    def now(self) -> float: ...

    @property
    def kernel(self) -> Kernel: ...

    def sleep(self, secs: float) -> Awaitable[None]: ...

    def run(
        self, main: Callable[..., Awaitable[Any]], *args: Any, until: Until | None = None
    ) -> Any: ...


class ClusterView(Protocol):
    """What workers, their programs and the search for standstills use of a `Cluster`."""

    num_workers: int
    workers: list[Worker]
    num_unfinished: int
    updates: int | None
    ended_at: float | None
    streams: Streams
    server: ParameterServer
    queue: Queue | None
    host: ServerHost | None
    links: Links | None
    ring: Ring | None
    timeline: Timeline
    nothing: Any

    @property
    def simulation(self) -> SimulationView: ...

    @property
    def kernel(self) -> Kernel: ...

    @property
    def global_step(self) -> GlobalStep: ...

    def clock(self) -> float: ...

    def set_away(self, worker: Worker, is_away: bool) -> None: ...


class Worker:
    """What a worker's program acts through. The cluster makes one for each worker.

    A program repeats: `pull`, `compute`, `push`; the first and the last wait as the protocol says.
    Training ends by a StopTraining that one of them raises, and that the program lets pass.

    Example:
        async def train(worker):
            while True:
                parameters, version = await worker.pull()
                if await worker.compute():
                    await worker.push(gradient(parameters), version)
    """

    __slots__ = (
        "_compute", "_epoch", "_is_undone", "_life", "_pull", "_push", "_rng", "_slot", "_until",
        "cluster", "index", "is_away", "is_finished", "is_in_session", "link_cuts",
        "meets_endless_failures", "num_computed", "num_pauses", "num_stops", "slowdowns", "task",
        "time", "version",
    )  # fmt: skip

    def __init__(
        self,
        cluster: ClusterView,
        index: int,
        compute: Delay,
        pull: Delay | None,
        push: Delay | None,
    ) -> None:
        self.cluster = cluster
        self.index = index
        """From 0."""
        draws = partial(cluster.streams.delays, index)
        self._compute = draws("compute", compute)
        self._pull = None if pull is None else draws("pull", pull)
        self._push = None if push is None else draws("push", push)
        self._rng: np.random.Generator | None = None
        self.is_in_session = False  # the session waits as the protocol says
        self._epoch = cluster.global_step.epoch  # when the protocol let it pull
        self._is_undone = False  # the server went back between that and the pull
        self._life = 0  # of the server, at the pull: the number of its crashes
        self._slot: Slot | None = None  # parked in while it computes
        self._until: Slot | None = None  # parked in until its repair
        self.is_finished = False
        self.is_away = True  # it has no open session, and may still open one
        self.link_cuts: LinkCuts = ()
        self.slowdowns: Slowdowns = ()
        self.meets_endless_failures = False  # of those that repeat for ever
        self.task: KernelTask | None = None
        # failures may overlap: it works only while both are 0
        self.num_stops = 0
        self.num_pauses = 0
        self.version = 0
        """The version of the last snapshot that it pulled."""
        self.num_computed = 0
        self.time = TimeAccount(index, cluster.clock, cluster.timeline)

    @property
    def rng(self) -> np.random.Generator:
        """This worker's own random numbers, the same for the same seed."""
        if self._rng is None:
            self._rng = self.cluster.streams.generator(self.index, "program")
        return self._rng

    def streams(self) -> tuple[DelayStream, DelayStream | None, DelayStream | None]:
        """Of what a computation, a pull and a push take."""
        return self._compute, self._pull, self._push

    async def pull(self) -> Snapshot:
        """The current parameters and their version, once the protocol lets this worker pull.

        Cancellation safe.

        Raises:
            StopTraining: training is over.
        """
        cluster = self.cluster
        if self.num_pauses:
            await self._until_repaired()
        if not self.is_in_session:
            await cluster.server.begin_step(self.index)
            if self.num_pauses:
                await self._until_repaired()
        if self.link_cuts:  # the request is a message, too
            await self._transfer("pull", None)
        if cluster.links is not None:
            await self._over_link("pull", cluster.links.request(self.index))
        if cluster.host is not None:
            await cluster.host.until_up(self)
            self._life = cluster.host.num_crashes
        snapshot = cluster.server.pull(self.index)
        self.version = snapshot.version
        is_late = self._epoch != cluster.global_step.epoch
        self._is_undone = is_late and cluster.server.waits_before_step
        if self._pull is not None:
            await self._transfer("pull", self._pull)
        if cluster.links is not None:
            await self._over_link("pull", cluster.links.download(self.index))
        return snapshot

    async def compute(self, secs: float | None = None) -> bool:
        """Spend the virtual time of one gradient on what was pulled last.

        Cancellation safe: the time until then is lost.

        Args:
            secs: seconds >= 0 on an unhindered worker; None: drawn from the cluster's delay.

        Returns:
            Whether it was finished; False if an update has made it useless, training is over, or
            the server was restored after the protocol had let this worker begin, so that it might
            be too far ahead now: then push nothing.

        Raises:
            TypeError, ValueError: `secs` is no such number.
        """
        cluster = self.cluster
        if self.num_pauses:
            await self._until_repaired()
        begun = cluster.clock()
        work = self._compute.next() if secs is None else checked_secs("secs", secs)
        kernel, server, delay = cluster.kernel, cluster.server, self._compute.delay
        if cluster.host is not None and cluster.host.num_crashes != self._life:
            self._is_undone = True
        value = _PAUSED
        try:
            while value is _PAUSED and not self._is_undone:
                start, takes = kernel.time, work
                if self.slowdowns or delay.changes_with_time:
                    takes = stretched(delay, self.slowdowns, start, work)
                self._slot = slot = Slot(kernel, "the end of its computation")
                remove = server.watch_update(self.version, slot)
                try:
                    value = await kernel.park(slot, start + takes)
                finally:
                    remove()
                if value is _PAUSED:
                    work -= work_done(delay, self.slowdowns, start, kernel.time - start, work)
                    await self._until_repaired()
        finally:
            self._slot = None
            is_done = value is TIMED_OUT
            self.num_computed += is_done
            self.time.spend("compute" if is_done else "lost", begun)
        return is_done

    async def push(self, gradient: Any, version: int | None = None) -> Pushed:
        """Send a gradient, and wait as the protocol says after its arrival. Cancellation safe.

        Args:
            gradient: names and shapes as the parameters'.
            version: of the snapshot that it was computed on; None: of the last one.

        Returns:
            Its outcome and staleness.
        """
        cluster = self.cluster
        version = self.version if version is None else version
        if self.num_pauses:
            await self._until_repaired()
        if self._push is not None or self.link_cuts:
            await self._transfer("push", self._push)
        if cluster.links is not None:
            await self._over_link("push", cluster.links.upload(self.index))
        elif cluster.ring is not None:
            await self._all_reduce(cluster.ring)
        if cluster.host is not None:
            await cluster.host.serve(self)
            if cluster.host.num_crashes != self._life:
                version = cluster.server.version + 1  # a later one is discarded
        elif cluster.queue is not None:
            begun = cluster.clock()
            try:
                await cluster.queue.serve()
            finally:
                self.time.spend("served", begun)
        return await self.arrive(gradient, version)

    async def arrive(self, gradient: Any, version: int | None = None) -> Pushed:
        """As `push`, of a gradient that is at the server."""
        cluster = self.cluster
        version = self.version if version is None else version
        pushed = cluster.server.push(self.index, gradient, version)
        if cluster.timeline.is_kept:
            now, after = cluster.kernel.time, cluster.server.version
            push = Push(self.index, now, pushed.outcome.value, pushed.staleness, after)
            cluster.timeline.pushes.append(push)
        if cluster.host is not None:
            cluster.host.has_updated()
        if not self.is_in_session:
            await cluster.server.end_step(self.index)
        return pushed

    def session(
        self,
        hooks: Sequence[Any] = (),
        *,
        gradient: Callable[[Any, Worker], Any] | None = None,
        step: Callable[[], Awaitable[Any]] | None = None,
        stop_grace_period_secs: float = 120,
        step_runner: StepRunnerName = "auto",
        recovery: Recovery | None = None,
    ) -> MonitoredSession:
        """A session whose run is one step of this worker: pull, compute, push, with all hooks.

        Open it by `async with`. It has the hooks of the protocol and of the cluster's number of
        updates.

        Args:
            hooks: further ones.
            gradient: of (parameters, worker); None: zeros, for laws of time.
            step: an async function in place of that, which returns a mapping of outputs; it may
                use `pull`, `compute` and `push`. Without it the outputs are "computed" (False for
                a useless computation), "staleness" and "outcome" (None where nothing was pushed).
            stop_grace_period_secs, step_runner, recovery: as for `MonitoredSession`.
        """
        self.is_in_session = True
        cluster = self.cluster
        own: list[SessionRunHook] = [_OpenedHook(self), ProtocolHook(cluster.server, self.index)]
        if cluster.updates is not None:
            own.append(StopAtStepHook(last_step=cluster.updates))

        async def run_step() -> dict[str, Any]:
            outputs = await (self._one_step(gradient) if step is None else step())
            return {**outputs, "global_step": cluster.server.version}

        return MonitoredSession(
            [*own, *hooks],
            FunctionSessionCreator(run_step, global_step=cluster.global_step),
            stop_grace_period_secs=stop_grace_period_secs,
            step_runner=step_runner,
            recovery=recovery,
        )

    async def _one_step(self, gradient: Callable[[Any, Worker], Any] | None) -> dict[str, Any]:
        snapshot = await self.pull()
        pushed = None
        is_computed = await self.compute()
        if is_computed:
            nothing = self.cluster.nothing
            value = nothing if gradient is None else gradient(snapshot.parameters, self)
            pushed = await self.push(value, snapshot.version)
        return {
            "computed": is_computed,
            "staleness": pushed and pushed.staleness,
            "outcome": pushed and pushed.outcome.value,
        }

    @property
    def is_down(self) -> bool:
        """Whether a failure stops or pauses it now."""
        return self.num_stops > 0 or self.num_pauses > 0

    @property
    def rng_state(self) -> Any:
        """The state of its own random numbers; equal where none was drawn in between."""
        return None if self._rng is None else str(self._rng.bit_generator.state)

    def go_down(self, *, loses_work: bool) -> None:
        """Stop or pause it; for failures."""
        self.time.go_down()
        if loses_work:
            self.num_stops += 1
            return
        self.num_pauses += 1
        if self._slot is not None:
            self._slot.wake(_PAUSED)

    def come_up(self, *, loses_work: bool) -> None:
        """End one failure; it works again once all have ended. For failures."""
        if loses_work:
            self.num_stops -= 1
        else:
            self.num_pauses -= 1
            if not self.num_pauses and self._until is not None:
                self._until.wake()
        if not (self.num_stops or self.num_pauses):
            self.time.come_up()

    def lose_computation(self) -> None:
        """End a computation that is under way; for a crash of the server."""
        if self._slot is not None:
            self._is_undone = True  # also where it is paused
            self._slot.wake(_LOST)

    async def wait(self, waiting: Awaitable[None]) -> None:
        """Wait, and count the time as waiting; for the server."""
        begun = self.cluster.clock()
        try:
            await waiting
        finally:
            self._epoch = self.cluster.global_step.epoch
            self.time.spend("wait", begun)

    async def spend(self, kind: str, waiting: Awaitable[Any]) -> Any:
        """Await, and count the time as this kind of span."""
        begun = self.cluster.clock()
        try:
            return await waiting
        finally:
            self.time.spend(kind, begun)

    async def _over_link(self, kind: str, moving: Awaitable[None]) -> None:
        """Wait until what moves over the network arrives."""
        sent = self.cluster.kernel.time
        await self.spend(kind, moving)
        if self.link_cuts:
            await self._transfer(kind, None, sent)

    async def _all_reduce(self, ring: Ring) -> None:
        is_done = False
        while not is_done:
            await self.spend("wait", ring.until_all_are_ready(self.index))
            is_done = await self.spend("push", ring.reduce(self.index))

    async def _until_repaired(self) -> None:
        kernel = self.cluster.kernel
        while self.num_pauses:
            self._until = Slot(kernel, "its repair")
            await kernel.park(self._until)
        self._until = None

    async def _transfer(
        self, what: str, stream: DelayStream | None, sent: float | None = None
    ) -> None:
        """Wait until a message arrives; without a stream it takes no time itself, or has taken it.

        Args:
            what: kind of span.
            stream: of the message's seconds.
            sent: when it was sent; None: now.
        """
        kernel = self.cluster.kernel
        arrives = kernel.time
        sent = arrives if sent is None else sent
        if stream is not None:
            arrives += stream.delay.stretch(sent, stream.next())
        if self.link_cuts:
            arrives = arrival(self.link_cuts, sent, arrives)
        if arrives <= kernel.time:
            return
        begun = self.cluster.clock()
        try:
            await kernel.park(Slot(kernel, "a message"), arrives)
        finally:
            self.time.spend(what, begun)

    def __repr__(self) -> str:
        return f"<worker {self.index} of {self.cluster.num_workers}>"


class _OpenedHook(SessionRunHook):
    """Reports to the cluster that the session of its worker is open."""

    uses_default_graph = False
    needs_session_in_begin = False

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def begin(self) -> None:
        self._worker.cluster.set_away(self._worker, False)


def check_workers(failure: object, workers: Collection[int], num_workers: int) -> None:
    """Raise TypeError or ValueError if the workers of a failure are not among the cluster's."""
    allowed = f"give numbers from 0 to {num_workers - 1}, as in workers=[0], or None for all"
    if isinstance(workers, str) or not isinstance(workers, Collection):
        raise TypeError(f"workers of {failure!r} is {workers!r}; {allowed}")
    for each in workers:
        if isinstance(each, bool) or not isinstance(each, Integral):
            raise TypeError(f"{failure!r} is for worker {each!r}; {allowed}")
        if not 0 <= each < num_workers:
            raise ValueError(f"{failure!r} is for worker {each}; {allowed}")
