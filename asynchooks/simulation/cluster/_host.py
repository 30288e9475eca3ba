"""The machine of the parameter server: its queues, its checkpoints, and its crashes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..._check import integer
from ..._engine.base import TIMED_OUT, Slot
from ...protocols import ParameterServer
from ..delays._delay import Delay, checked_delay, checked_secs_above_zero
from ..delays._distributions import Constant
from ..delays._streams import Streams
from ..kernel._kernel import Call, Kernel
from ..output._timeline import Timeline
from ._network import Queue

_NO_TIME = Constant(0.0)


@dataclass(frozen=True)
class Checkpoints:
    """When the parameter server saves its state, and what that costs; for `Simulation.cluster`.

    A checkpoint is durable once its save has ended; then a crash of the server (`ServerCrashes`)
    undoes only the updates after it. Nothing is saved while there is no new update. What comes due
    during a save begins at its end.

    Args:
        every_updates: updates from one save to the next, >= 1.
        every_secs: virtual seconds from the end of a save to the begin of the next, > 0; exactly
            one of the two is given.
        save: seconds that a save takes.
        restore: seconds that loading a checkpoint takes, after each crash.
        blocks: whether pulls and pushes wait until a save has ended; else it runs in the
            background.

    Raises:
        TypeError, ValueError: an argument does not fit, or not exactly one interval is given.

    Example:
        simulation = Simulation(seed=7, backend="turbo")
        checkpoints = Checkpoints(every_updates=2, save=Constant(0.5))
        cluster = simulation.cluster(1, compute=Constant(1.0), checkpoints=checkpoints)
        report = cluster.run(updates=5)
        assert report.secs == 6.0 and report.num_saves == 2
    """

    every_updates: int | None = None
    every_secs: float | None = None
    save: Delay = _NO_TIME
    restore: Delay = _NO_TIME
    blocks: bool = True

    def __post_init__(self) -> None:
        if (self.every_updates is None) == (self.every_secs is None):
            given = "neither" if self.every_updates is None else "both"
            raise ValueError(
                f"got {given} of every_updates and every_secs; give one, as in "
                "Checkpoints(every_updates=100)"
            )
        if self.every_updates is not None:
            integer("every_updates", self.every_updates, least=1)
        else:
            checked_secs_above_zero("every_secs", self.every_secs)
        checked_delay("save", self.save)
        checked_delay("restore", self.restore)


class Requester(Protocol):
    """A worker that waits for the server."""

    async def spend(self, kind: str, waiting: Any) -> Any: ...


class ServerHost:
    """Saves, crashes and restores of a cluster's server while it trains. The cluster makes it.

    While it is down, or saves and blocks, requests wait outside. A crash drops those in the
    queues, which ask again once it is up, to learn that their gradients are discarded.
    """

    def __init__(
        self,
        kernel: Kernel,
        server: ParameterServer,
        streams: Streams,
        checkpoints: Checkpoints | None,
        queues: list[Queue],
        timeline: Timeline,
        lose_work: Callable[[], object],  # of all workers, that is under way
    ) -> None:
        self._kernel = kernel
        self._server = server
        self._checkpoints = checkpoints
        self._queues = queues
        self._timeline = timeline
        self._lose_work = lose_work
        if checkpoints is not None:
            self._save_draws = streams.delays(0, "save", checkpoints.save)
            self._restore_draws = streams.delays(0, "restore", checkpoints.restore)
        self._durable = server.state_dict()
        self._worked_since = kernel.time  # on top of that state
        self._saving: tuple[float, dict[str, Any]] | None = None  # since when, what
        self._end_of_save: Call | None = None
        self._save_due_at = math.inf  # in seconds, where that decides
        self._timer: Call | None = None
        self._last_saved = server.version
        self._num_down = 0  # crashes may overlap
        self._down_since = 0.0
        self._waiting: dict[Slot, None] = {}  # until it is up, in order
        self._served: dict[Slot, None] = {}  # in the queues
        self.num_saves = 0
        """Those that have become durable."""
        self.secs_saving = 0.0
        self.secs_down = 0.0
        self.num_crashes = 0
        self.num_undone = 0
        """Updates that crashes have undone."""
        self.secs_undone = 0.0
        """Seconds in which they, and what was under way, were made."""
        self._set_due()

    @property
    def is_blocked(self) -> bool:
        """Whether requests wait."""
        if self._num_down:
            return True
        return self._saving is not None and self._checkpoints.blocks  # type: ignore[union-attr]

    async def until_up(self, requester: Requester) -> None:
        """Wait until the server takes requests; the time counts as waiting."""
        while self.is_blocked:
            slot = Slot(self._kernel, "the parameter server, which is down or saves")
            self._waiting[slot] = None
            try:
                await requester.spend("wait", self._kernel.park(slot))
            finally:
                self._waiting.pop(slot, None)

    async def serve(self, requester: Requester) -> None:
        """Wait until a push of this task is served by every server."""
        await self.until_up(requester)
        while self._queues:
            ends = max(queue.enter() for queue in self._queues)
            slot = Slot(self._kernel, "its turn at the server")
            self._served[slot] = None
            try:
                value = await requester.spend("served", self._kernel.park(slot, ends))
            finally:
                self._served.pop(slot, None)
            await self.until_up(requester)
            if value is TIMED_OUT:
                return

    def has_updated(self) -> None:
        """Begin a save, if the updates have made it due; after each push."""
        plan = self._checkpoints
        if plan is None or self._saving is not None or self._num_down or self._server.is_over:
            return
        version = self._server.version
        if version == self._last_saved:
            return
        if plan.every_updates is not None:
            if version - self._last_saved >= plan.every_updates:
                self._begin_save()
        elif self._kernel.time >= self._save_due_at:
            self._begin_save()

    def _set_due(self) -> None:
        """Let the next save come due, so many seconds from now on."""
        plan, kernel = self._checkpoints, self._kernel
        if plan is None or plan.every_secs is None:
            return
        self._forget(self._timer)
        self._save_due_at = kernel.time + float(plan.every_secs)  # of NumPy, too
        self._timer = Call(self.has_updated, "the next checkpoint")
        kernel.push(self._save_due_at, self._timer)

    def _forget(self, call: Call | None) -> None:
        if call is not None and call.due:
            self._kernel.forget(call)

    def close(self) -> None:
        """Begin and end no further save."""
        self._forget(self._timer)
        self._forget(self._end_of_save)

    def _begin_save(self) -> None:
        kernel = self._kernel
        self._saving = (kernel.time, self._server.state_dict())
        self._last_saved = self._server.version
        draws = self._save_draws
        secs = draws.delay.stretch(kernel.time, draws.next())
        if secs == 0:
            self._end_save()
        else:
            self._end_of_save = Call(self._end_save, "the end of a save")
            kernel.push(kernel.time + secs, self._end_of_save)

    def _end_save(self) -> None:
        assert self._saving is not None
        begun, state = self._saving
        self._durable = state
        self.num_saves += 1
        blocks = self._checkpoints.blocks  # type: ignore[union-attr]
        self._worked_since = self._kernel.time if blocks else begun
        self._finish_save()
        self._set_due()
        self.has_updated()
        self._admit()

    def _finish_save(self) -> None:
        assert self._saving is not None
        begun, self._saving = self._saving[0], None
        self._forget(self._end_of_save)
        self.secs_saving += self._kernel.time - begun
        self._note("save", begun)

    def _admit(self) -> None:
        """Let the requests that wait outside in, in their order."""
        if not self.is_blocked:
            waiting, self._waiting = self._waiting, {}
            for slot in waiting:
                slot.wake()

    def crash(self) -> None:
        """Go down, back to the last durable state; for failures. Each needs a `come_up`."""
        now, server = self._kernel.time, self._server
        self._num_down += 1
        if self._num_down > 1:  # all is lost already
            return
        self._forget(self._timer)
        worked_until = now
        if self._saving is not None:
            if self._checkpoints.blocks:  # type: ignore[union-attr]
                worked_until = self._saving[0]
            self._finish_save()
        self._down_since = now
        version = int(self._durable["version"])
        self.num_undone += server.version - version
        self.secs_undone += worked_until - self._worked_since
        self._last_saved = version
        self.num_crashes += 1
        for queue in self._queues:
            queue.clear()
        server.load_state_dict(self._durable)
        self._lose_work()
        served, self._served = self._served, {}
        for slot in served:
            slot.wake()

    def restore_secs(self) -> float:
        """Seconds that loading the checkpoint takes now; for failures."""
        if self._checkpoints is None:
            return 0.0
        draws = self._restore_draws
        return draws.delay.stretch(self._kernel.time, draws.next())

    def come_up(self) -> None:
        """End one crash; the server takes requests again once all have ended. For failures."""
        self._num_down -= 1
        if self._num_down:
            return
        now = self._kernel.time
        self.secs_down += now - self._down_since
        self._note("down", self._down_since)
        self._worked_since = now
        self._set_due()
        self._admit()

    def figures(self, now: float) -> dict[str, Any]:
        """Those of a report, at a time at which the server had its last change or later."""
        saving = 0.0 if self._saving is None else max(0.0, now - self._saving[0])
        down = max(0.0, now - self._down_since) if self._num_down else 0.0
        return {
            "num_saves": self.num_saves,
            "secs_saving": self.secs_saving + saving,
            "num_server_crashes": self.num_crashes,
            "secs_server_down": self.secs_down + down,
            "undone_updates": self.num_undone,
            "secs_undone": self.secs_undone,
        }

    def _note(self, kind: str, begun: float) -> None:
        if self._timeline.is_kept and self._kernel.time > begun:
            self._timeline.server.append((kind, begun, self._kernel.time))
