"""One worker of a simulated cluster: it pulls parameters, spends time, and pushes gradients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._engine import TIMED_OUT, EngineTask, Slot
from .._session import MonitoredSession
from .._signal import Signal
from ..protocols import Pushed, Snapshot
from ._arguments import checked_secs
from ._books import SERVED, Books
from ._network import Closures
from ._slowdowns import Slowdowns, stretched, work_done
from ._streams import DelayStream
from ._worker_session import session_of

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
        "_compute", "_epoch", "_is_in_session", "_is_undone", "_pulls", "_pushes", "_rng", "_slot",
        "_until", "books", "closures", "cluster", "index", "is_away", "is_finished", "num_computed",
        "num_pauses", "num_stops", "slowdowns", "task", "version",
    )  # fmt: skip

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster = cluster
        self.index = index
        """From 0."""
        streams, delays = cluster.streams, cluster.delays
        self._compute = streams.delays(index, "compute", delays.compute)
        self._pulls = self._pushes = None
        if delays.pull is not None:
            self._pulls = streams.delays(index, "pull", delays.pull)
        if delays.push is not None:
            self._pushes = streams.delays(index, "push", delays.push)
        self._rng: np.random.Generator | None = None
        self._is_in_session = False
        self._epoch = cluster.global_step.epoch  # in which the protocol let it pull
        self._is_undone = False  # the server went back between that and the pull
        self._slot: Slot | None = None  # where it computes
        self._until: Slot | None = None  # where it waits for its repair
        self.is_finished = False
        self.is_away = True  # it has no session open, and may yet have one
        self.closures: Closures | None = None
        self.slowdowns: Slowdowns | None = None
        self.task: EngineTask | None = None
        # failures overlap: it works only while neither its program is stopped nor stands still
        self.num_stops = 0
        self.num_pauses = 0
        self.version = 0
        """Of the last snapshot that it pulled."""
        self.num_computed = 0
        self.books = Books(index, cluster.clock, cluster.timeline)

    @property
    def rng(self) -> np.random.Generator:
        """This worker's own random numbers, the same for the same seed."""
        if self._rng is None:
            self._rng = self.cluster.streams.generator(self.index, "program")
        return self._rng

    async def pull(self) -> Snapshot:
        """The present parameters and their version, as soon as the protocol lets this worker.

        Cancellation safe.

        Raises:
            StopTraining: training is over.
        """
        cluster = self.cluster
        if self.num_pauses:
            await self._until_repaired()
        if not self._is_in_session:
            await cluster.server.begin_step(self.index)
            if self.num_pauses:
                await self._until_repaired()
        if self.closures is not None:  # what it asks for is a message, too
            await self._transfer("pull", None)
        snapshot = cluster.server.pull(self.index)
        self.version = snapshot.version
        is_late = self._epoch != cluster.global_step.epoch
        self._is_undone = is_late and cluster.server._waits_before
        if self._pulls is not None:
            await self._transfer("pull", self._pulls)
        return snapshot

    async def compute(self, secs: float | None = None) -> bool:
        """Spend the virtual time of one gradient on what was pulled last.

        Cancellation safe: it has lost the time.

        Args:
            secs: seconds >= 0 on an unhindered worker; None: drawn from the cluster's delay.

        Returns:
            Whether it was finished; False if an update has made it useless meanwhile, training is
            over, or the server was restored after the protocol had let this worker begin, so that
            it might be too far ahead now: then push nothing.

        Raises:
            TypeError, ValueError: `secs` is no such number.
        """
        cluster = self.cluster
        if self.num_pauses:
            await self._until_repaired()
        begun = cluster.clock()
        work = self._compute.next() if secs is None else checked_secs("secs", secs)
        kernel, server, delay = cluster.kernel, cluster.server, self._compute.delay
        value = _PAUSED
        try:
            while value is _PAUSED and not self._is_undone:
                start, takes = kernel.time, work
                if delay.changes_with_time or self.slowdowns is not None:
                    takes = stretched(delay, self.slowdowns, start, work)
                self._slot = slot = Slot(kernel, "the end of its computation")
                forget = server.watch_update(self.version, slot)
                try:
                    value = await kernel.park(slot, start + takes)
                finally:
                    forget()
                if value is _PAUSED:
                    work -= work_done(delay, self.slowdowns, start, kernel.time - start, work)
                    await self._until_repaired()
        finally:
            self._slot = None
            is_done = value is TIMED_OUT
            self.num_computed += is_done
            self.books.book("compute" if is_done else "lost", begun)
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
        if self.num_pauses:
            await self._until_repaired()
        if self._pushes is not None or self.closures is not None:
            await self._transfer("push", self._pushes)
        if cluster.queue is not None:
            begun = cluster.clock()
            try:
                await cluster.queue.serve()
            finally:
                self.books.book(SERVED, begun)
        pushed = cluster.server.push(self.index, gradient, version)
        cluster.timeline.pushed(self.index, cluster.kernel.time, pushed, cluster.server.version)
        if not self._is_in_session:
            await cluster.server.end_step(self.index)
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
        self._is_in_session = True
        return session_of(self, hooks, gradient, step, options)

    def begins_anew(self) -> None:
        """Its program is about to start; for the cluster."""
        self._is_in_session = False

    def go_down(self, *, loses_work: bool) -> None:
        """It works no further: its program is stopped, or stands still; for failures."""
        self.books.go_down()
        if loses_work:
            self.num_stops += 1
            return
        self.num_pauses += 1
        if self._slot is not None:
            self._slot.wake(_PAUSED)

    def come_up(self, *, loses_work: bool) -> None:
        """One failure is over; it works again once all are. For failures."""
        if loses_work:
            self.num_stops -= 1
        else:
            self.num_pauses -= 1
            if not self.num_pauses and self._until is not None:
                self._until.wake()
        if not (self.num_stops or self.num_pauses):
            self.books.come_up()

    async def wait(self, waiting: Awaitable[None]) -> None:
        """Wait for others, and count that as such; for the server."""
        begun = self.cluster.clock()
        try:
            await waiting
        finally:
            self._epoch = self.cluster.global_step.epoch
            self.books.book("wait", begun)

    async def _until_repaired(self) -> None:
        kernel = self.cluster.kernel
        while self.num_pauses:
            self._until = Slot(kernel, "its repair")
            await kernel.park(self._until)
        self._until = None

    async def _transfer(self, what: str, stream: DelayStream | None) -> None:
        """Send a message, and wait until it arrives; without a stream it takes no time itself."""
        kernel = self.cluster.kernel
        sent = arrives = kernel.time
        if stream is not None:
            arrives += stream.delay.stretch(sent, stream.next())
        if self.closures is not None:
            arrives = self.closures.arrival(sent, arrives)
        if arrives <= sent:
            return
        begun = self.cluster.clock()
        try:
            await kernel.park(Slot(kernel, "a message"), arrives)
        finally:
            self.books.book(what, begun)

    def __repr__(self) -> str:
        return f"<worker {self.index} of {self.cluster.num_workers}>"
