"""One worker of a simulated cluster: it pulls parameters, spends time, and pushes gradients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._engine import TIMED_OUT, EngineTask, Slot
from .._function_session import FunctionSessionCreator
from .._session import MonitoredSession
from .._signal import Signal
from ..hooks import StopAtStepHook
from ..protocols import Fate, ProtocolHook, Pushed, Snapshot
from ._network import Closures
from ._slowdowns import Slowdowns
from ._streams import DelayStream

if TYPE_CHECKING:
    from ._cluster import Cluster

_PAUSED = Signal("PAUSED")


class Worker:
    """What a worker's program acts through. The cluster makes one for each, and counts its time.

    A program repeats: `pull`, `compute`, `push`; the first and the last wait as the protocol says.
    Training ends by a StopTraining out of one of them, which the program lets pass.

    Example:
        async def train(worker):
            while True:
                parameters, version = await worker.pull()
                if await worker.compute():
                    await worker.push(gradient(parameters), version)
    """

    __slots__ = (
        "_compute",
        "_is_in_session",
        "_paused_since",
        "_pulls",
        "_pushes",
        "_rng",
        "_slot",
        "_until",
        "closures",
        "cluster",
        "index",
        "is_finished",
        "num_computed",
        "secs_computed",
        "secs_down",
        "secs_lost",
        "secs_pulled",
        "secs_pushed",
        "secs_waited",
        "slowdowns",
        "task",
        "version",
    )  # fmt: skip

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster = cluster
        self.index = index
        """From 0."""
        streams, delays = cluster.simulation.streams, cluster.delays
        self._compute = streams.delays(index, "compute", delays.compute)
        self._pulls = self._pushes = None
        if delays.pull is not None:
            self._pulls = streams.delays(index, "pull", delays.pull)
        if delays.push is not None:
            self._pushes = streams.delays(index, "push", delays.push)
        self._rng: np.random.Generator | None = None
        self._is_in_session = False
        self._slot: Slot | None = None  # where it computes
        self._paused_since: float | None = None
        self._until: Slot | None = None  # where it waits for its repair
        self.is_finished = False
        self.closures: Closures | None = None
        self.slowdowns: Slowdowns | None = None
        self.task: EngineTask | None = None
        self.version = 0
        """Of the last snapshot that it pulled."""
        self.num_computed = 0
        self.secs_computed = self.secs_lost = self.secs_waited = 0.0
        self.secs_pulled = self.secs_pushed = self.secs_down = 0.0

    @property
    def rng(self) -> np.random.Generator:
        """This worker's own random numbers, the same for the same seed."""
        if self._rng is None:
            self._rng = self.cluster.simulation.streams.generator(self.index, "program")
        return self._rng

    async def pull(self) -> Snapshot:
        """The present parameters and their version, as soon as the protocol lets this worker.

        Cancellation safe.

        Raises:
            StopTraining: training is over.
        """
        cluster = self.cluster
        if not self._is_in_session:
            await self._wait(cluster.server.begin_step(self.index))
        snapshot = cluster.server.pull(self.index)
        self.version = snapshot.version
        if self._pulls is not None:
            self.secs_pulled += await self._transfer("pull", self._pulls)
        return snapshot

    async def compute(self, secs: float | None = None) -> bool:
        """Spend the virtual time of one gradient on what was pulled last.

        Cancellation safe: it has lost the time.

        Args:
            secs: seconds >= 0 on an unhindered worker; None: drawn from the cluster's delay.

        Returns:
            Whether it was finished; False if an update has made it useless meanwhile, or training
            is over: then push nothing.
        """
        cluster = self.cluster
        kernel = cluster.kernel
        begun = kernel.time
        if self._paused_since is not None:
            await self._until_repaired()
        stream = self._compute
        if secs is None:
            secs = stream.next()
        if stream.delay.changes_with_time:
            secs = stream.delay.stretch(kernel.time, secs)
        if self.slowdowns is not None:
            secs = self.slowdowns.stretch(kernel.time, secs)
        ends = kernel.time + secs
        is_done = False
        try:
            while True:
                self._slot = slot = Slot(kernel, "the end of its computation")
                forget = cluster.server.watch_update(self.version, slot)
                try:
                    value = await kernel.park(slot, ends)
                finally:
                    forget()
                if value is not _PAUSED:
                    break
                left = ends - kernel.time
                await self._until_repaired()
                ends = kernel.time + left
            is_done = value is TIMED_OUT
        finally:
            self._slot = None
            spent = kernel.time - begun
            if is_done:
                self.num_computed += 1
                self.secs_computed += spent
            else:
                self.secs_lost += spent
            cluster.timeline.add(self.index, "compute" if is_done else "lost", begun, kernel.time)
        return is_done

    async def push(self, gradient: Any, version: int | None = None) -> Pushed:
        """Send a gradient, and wait as the protocol says once it is there. Cancellation safe.

        Args:
            gradient: names and shapes as the parameters'.
            version: of the snapshot that it was computed on; None: of the last one.

        Returns:
            What became of it, and its staleness.
        """
        cluster = self.cluster
        version = self.version if version is None else version
        if self._pushes is not None:
            self.secs_pushed += await self._transfer("push", self._pushes)
        if cluster.queue is not None:
            begun = cluster.kernel.time
            self.secs_pushed += await cluster.queue.serve()
            cluster.timeline.add(self.index, "served", begun, cluster.kernel.time)
        pushed = cluster.server.push(self.index, gradient, version)
        if pushed.fate is Fate.APPLIED:
            cluster.last_update_at = cluster.kernel.time
        cluster.timeline.pushed(self.index, cluster.kernel.time, pushed, cluster.server.version)
        if not self._is_in_session:
            await self._wait(cluster.server.end_step(self.index))
        return pushed

    def session(
        self,
        hooks: Sequence[Any] = (),
        *,
        gradient: Callable[[Any, Worker], Any] | None = None,
        step: Callable[[], Awaitable[Any]] | None = None,
        **options: Any,
    ) -> MonitoredSession:
        """A session whose run is one step of this worker: pull, compute, push, with all hooks.

        Open it by `async with`; the hooks of the protocol and of the cluster's number of updates
        are in it.

        Args:
            hooks: further ones.
            gradient: of (parameters, worker); None: zeros, for laws of time.
            step: an async function in place of that, which returns a mapping of outputs; it may
                use `pull`, `compute` and `push`. Else the outputs are "computed" (whether it was
                in vain), "staleness" and "fate" (None where nothing was pushed).
            options: of `MonitoredSession`.
        """
        server = self.cluster.server
        own: list[Any] = [ProtocolHook(server, self.index)]
        if self.cluster.updates is not None:
            own.append(StopAtStepHook(last_step=self.cluster.updates))
        self._is_in_session = True
        creator = FunctionSessionCreator(
            self._step_function(gradient, step), global_step=server.global_step
        )
        return MonitoredSession([*own, *hooks], creator, **options)

    def _step_function(self, gradient: Any, step: Any) -> Callable[[], Awaitable[Any]]:
        server = self.cluster.server

        async def plain() -> dict[str, Any]:
            snapshot = await self.pull()
            pushed = None
            is_computed = await self.compute()
            if is_computed:
                value = (
                    self.cluster.nothing
                    if gradient is None
                    else gradient(snapshot.parameters, self)
                )
                pushed = await self.push(value, snapshot.version)
            return {
                "computed": is_computed,
                "staleness": pushed and pushed.staleness,
                "fate": pushed and pushed.fate.value,
                "global_step": server.version,
            }

        async def given() -> dict[str, Any]:
            return {**await step(), "global_step": server.version}

        return plain if step is None else given

    def pause(self) -> None:
        """It computes no further, from now until `resume`; what it has done is not lost."""
        self._paused_since = self.cluster.kernel.time
        if self._slot is not None:
            self._slot.wake(_PAUSED)

    def resume(self) -> None:
        """It goes on with what it computed."""
        self._paused_since = None
        if self._until is not None:
            self._until.wake()

    def has_been_down(self, begun: float) -> None:
        """Take down that it worked not from then until now; for failures."""
        now = self.cluster.kernel.time
        self.secs_down += now - begun
        self.cluster.timeline.add(self.index, "down", begun, now)

    async def _until_repaired(self) -> None:
        kernel = self.cluster.kernel
        while self._paused_since is not None:
            self._until = Slot(kernel, "its repair")
            await kernel.park(self._until)
        self._until = None

    async def _wait(self, waiting: Any) -> None:
        kernel = self.cluster.kernel
        begun = kernel.time
        try:
            await waiting
        finally:
            if kernel.time > begun:
                self.secs_waited += kernel.time - begun
                self.cluster.timeline.add(self.index, "wait", begun, kernel.time)

    async def _transfer(self, what: str, stream: DelayStream) -> float:
        """Send a message, and wait until it arrives; returns the seconds that took."""
        kernel = self.cluster.kernel
        sent = kernel.time
        arrives = sent + stream.delay.stretch(sent, stream.next())
        if self.closures is not None:
            arrives = self.closures.arrival(sent, arrives)
        if arrives > sent:
            await kernel.park(Slot(kernel, "a message"), arrives)
            self.cluster.timeline.add(self.index, what, sent, kernel.time)
        return arrives - sent

    def __repr__(self) -> str:
        return f"<worker {self.index} of {self.cluster.num_workers}>"
