"""One worker of a simulated cluster: it pulls parameters, spends time, and pushes gradients."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
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
from ..delays._delay import checked_secs
from ..delays._streams import DelayStream, Streams
from ..kernel._kernel import Kernel, KernelTask, Until
from ..output._timeline import Push, TimeAccount, Timeline
from ._network import LinkCuts, Message, Queue, arrival

_CHANGED = Sentinel("CHANGED")
"""What a computation is woken with when the speed of its worker has changed."""


class SimulationView(Protocol):
    """What a cluster and the programs of its workers use of their `Simulation`."""

    @property
    def now(self) -> float: ...

    @property
    def kernel(self) -> Kernel: ...

    def sleep(self, secs: float) -> Awaitable[None]: ...

    def run(
        self, main: Callable[..., Awaitable[Any]], *args: Any, until: Until | None = None
    ) -> Any: ...


class ClusterView(Protocol):
    """What workers and their programs use of a `Cluster`."""

    num_workers: int
    updates: int | None
    streams: Streams
    server: ParameterServer
    queues: list[Queue]
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

    def __init__(
        self,
        cluster: ClusterView,
        index: int,
        compute: DelayStream,
        messages: tuple[Message | None, Message | None, Message | None],
    ) -> None:
        self.cluster = cluster
        self.index = index
        """From 0."""
        self._compute = compute
        self._request, self._download, self._upload = messages  # None: it takes no time
        self._rng: np.random.Generator | None = None
        self.is_in_session = False  # the session waits as the protocol says
        self.is_finished = False
        self.is_away = True  # it has no open session, and may still open one
        self.link_cuts: LinkCuts = ()
        self.task: KernelTask | None = None
        self._epoch = cluster.global_step.epoch  # when the protocol let it pull
        self._is_undone = False  # the server went back between that and the pull
        self._computing: Slot | None = None  # parked in while it computes, until:
        self._ends = 0.0
        self._paused: Slot | None = None  # parked in until its repair
        # failures may overlap: it works only while it has no stops and no pauses
        self.num_stops = 0
        self._num_pauses = 0
        self._factors: list[float] = []  # of the slowdowns that hold now
        self.version = 0
        """The version of the last snapshot that it pulled."""
        self.num_computed = 0
        self.bytes_moved = 0
        self.time = TimeAccount(index, cluster.clock, cluster.timeline)

    @property
    def rng(self) -> np.random.Generator:
        """This worker's own random numbers, the same for the same seed."""
        if self._rng is None:
            self._rng = self.cluster.streams.generator(self.index, "program")
        return self._rng

    async def pull(self) -> Snapshot:
        """The current parameters and their version, once the protocol lets this worker pull.

        Cancellation safe.

        Raises:
            StopTraining: training is over.
        """
        server = self.cluster.server
        if self._num_pauses:
            await self._until_repaired()
        if not self.is_in_session:
            await server.begin_step(self.index)
            if self._num_pauses:
                await self._until_repaired()
        if self._request is not None or self.link_cuts:  # the request is a message, too
            await self._send("pull", self._request)
        snapshot = server.pull(self.index)
        self.version = snapshot.version
        is_late = self._epoch != server.global_step.epoch
        self._is_undone = is_late and server.waits_before_step
        if self._download is not None:
            await self._send("pull", self._download)
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
        if self._num_pauses:
            await self._until_repaired()
        kernel, begun = cluster.kernel, cluster.clock()
        left = self._compute.next() if secs is None else checked_secs("secs", secs)
        value = _CHANGED
        try:
            while value is _CHANGED and not self._is_undone:
                start, slowness = kernel.time, self._slowness()
                # a pause does not hold up work that takes no time
                self._ends = start + (left * slowness if left else 0.0)
                self._computing = slot = Slot(kernel, "the end of its computation")
                remove = cluster.server.watch_update(self.version, slot)
                try:
                    value = await kernel.park(slot, self._ends)
                finally:
                    remove()
                left = max(0.0, left - (kernel.time - start) / slowness)
        finally:
            self._computing = None
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
        if self._num_pauses:
            await self._until_repaired()
        if self._upload is not None or self.link_cuts:
            await self._send("push", self._upload)
        if cluster.queues and not cluster.server.is_over:  # one that is late is discarded at once
            ends = max([queue.enter() for queue in cluster.queues])
            await self._wait_until(ends, "served", "its turn at the server")
        pushed = cluster.server.push(self.index, gradient, version)
        if cluster.timeline.is_kept:
            now, after = cluster.kernel.time, cluster.server.version
            push = Push(self.index, now, pushed.outcome.value, pushed.staleness, after)
            cluster.timeline.pushes.append(push)
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
    def may_continue(self) -> bool:
        """Whether it stands still now because of a failure, which may end."""
        return self.num_stops > 0 or self._slowness() == math.inf

    def go_down(self, *, loses_work: bool) -> None:
        """Stop or pause it; for failures."""
        self.time.go_down()
        if loses_work:
            self.num_stops += 1
        else:
            self._num_pauses += 1
            self._change_speed()

    def come_up(self, *, loses_work: bool) -> None:
        """End one failure; it works again once all have ended. For failures."""
        if loses_work:
            self.num_stops -= 1
        else:
            self._num_pauses -= 1
            self._change_speed()
            if not self._num_pauses and self._paused is not None:
                self._paused.wake()
        if not (self.num_stops or self._num_pauses):
            self.time.come_up()

    def slow_down(self, factor: float) -> None:
        """Let its work take so many times as long from now on; for failures."""
        self._factors.append(factor)
        self._change_speed()

    def speed_up(self, factor: float) -> None:
        """End a slowdown by this factor; for failures."""
        self._factors.remove(factor)
        self._change_speed()

    def _slowness(self) -> float:
        """How many times as long its work takes now."""
        if self._num_pauses:
            return math.inf
        return math.prod(self._factors) if self._factors else 1.0

    def _change_speed(self) -> None:
        # what ends at this very moment has been done at the speed before
        if self._computing is not None and self._ends > self.cluster.kernel.time:
            self._computing.wake(_CHANGED)

    async def wait(self, waiting: Awaitable[None]) -> None:
        """Wait, and count the time as waiting; for the server."""
        begun = self.cluster.clock()
        try:
            await waiting
        finally:
            self._epoch = self.cluster.global_step.epoch
            self.time.spend("wait", begun)

    async def _until_repaired(self) -> None:
        kernel = self.cluster.kernel
        while self._num_pauses:
            self._paused = slot = Slot(kernel, "its repair")
            await kernel.park(slot)
        self._paused = None

    async def _send(self, kind: str, message: Message | None) -> None:
        """Wait until a message arrives; without one, until it would that takes no time itself."""
        now = self.cluster.kernel.time
        arrives = now if message is None else message.arrival(now)
        if self.link_cuts:
            arrives = arrival(self.link_cuts, now, arrives)
        await self._wait_until(arrives, kind, "a message")
        if message is not None and arrives <= self.cluster.clock():  # before training ended
            self.bytes_moved += message.num_bytes

    async def _wait_until(self, time: float, kind: str, what: str) -> None:
        """Wait until that time, and count it as this kind of span."""
        kernel, begun = self.cluster.kernel, self.cluster.clock()
        if time <= kernel.time:
            return
        try:
            await kernel.park(Slot(kernel, what), time)
        finally:
            self.time.spend(kind, begun)

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
