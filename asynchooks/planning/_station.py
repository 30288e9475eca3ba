"""Station: where one kind of work is done in virtual time. It knows of no program and of no trace.

Who is next, and when, depends on the kind: work that depends on nothing sleeps; servers with a
queue take it in order; a shared service does all that is under way at once, at a speed that falls
with the load. That one is kept by a clock of work, which is how much each one under way has had
since the beginning: one addition for each change of the load, however many share.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .._engine.base import Slot
from ..simulation.kernel._kernel import Call, Kernel
from ._service import Beyond, Dependence, Service

_CHUNK = 256
"""Draws that are made at once."""
_SAME = 1e-12
"""Shares of one are equal up to this."""


class Drawn(NamedTuple):
    """What a plan has drawn for one call, for `returns` of `timed`.

    Example:
        @timed("rollout", output_size=len, returns=lambda prompt, drawn: "x" * int(drawn.size))
        async def rollout(prompt):
            return await client.generate(prompt)
    """

    secs: float
    """How long the work takes alone, in seconds; among others it may take longer."""
    size: float
    """What `output_size` gave, or gives for `input_size`; NaN if the call has neither."""


@dataclass(slots=True)
class Use:
    """How a plan has used a service: under which loads, sizes and workers."""

    loads: dict[int, int] = field(default_factory=dict)
    """How often that many were under way as work began, that included."""
    low_size: float = math.inf
    high_size: float = -math.inf
    num_workers: int = 0
    """One more than the greatest number of a worker."""

    def add(self, other: Use) -> None:
        """As if both had been one."""
        for load, num in other.loads.items():
            self.loads[load] = self.loads.get(load, 0) + num
        self.low_size = min(self.low_size, other.low_size)
        self.high_size = max(self.high_size, other.high_size)
        self.num_workers = max(self.num_workers, other.num_workers)

    def load_range(self) -> tuple[int, int]:
        """Between which loads all but a hundredth of the work on either side began."""
        total, seen = sum(self.loads.values()), 0
        low = high = 0
        for load in sorted(self.loads):
            if seen <= 0.01 * total:
                low = load
            if seen < 0.99 * total:
                high = load
            seen += self.loads[load]
        return low, high


class Station:
    """Does one kind of work, of all tasks of a simulation; a plan makes it at its first call.

    Args:
        kernel: of the simulation.
        service: what is drawn from.
        rng: draws it.
        beyond: what is assumed outside of the load that was recorded.
        are_sizes_linear: whether work grows with its size, where no law of that was recorded.
    """

    def __init__(
        self,
        kernel: Kernel,
        service: Service,
        rng: np.random.Generator,
        beyond: Beyond = Beyond.LAW,
        *,
        are_sizes_linear: bool = False,
    ) -> None:
        self.kernel, self.service, self._rng = kernel, service, rng
        self.use = Use()
        self._beyond = beyond
        self._what = f"the end of {service.name}"
        self._samples: list[float] = service.samples.tolist()
        self._sizes: list[float] = service.sizes.tolist()
        law = service.size_law
        self._ratios: list[float] | None = None if law is None else law.ratios.tolist()
        mean = float(service.sizes.mean()) if are_sizes_linear and len(service.sizes) else math.nan
        self._per_size = 1.0 / mean if mean > 0 else 0.0  # 0: sizes do not matter
        # of each worker that was recorded the places of its samples; empty if workers are alike
        workers = service.workers
        self._pools = [np.flatnonzero(workers == each) for each in np.unique(workers[workers >= 0])]
        self._picks: dict[int, list[int]] = {}  # drawn ahead, by pool; -1: of all
        self.num_under_way = 0
        depends_outside = beyond is not Beyond.LAW and not service.is_own
        self._is_queue = service.dependence is Dependence.QUEUE
        self._is_shared = not self._is_queue and (
            depends_outside or (service.dependence is Dependence.SHARED and service.slowdown > 0)
        )
        self._free_at = [0.0] * service.num_servers
        # of the clock of work
        # (its end by the clock, order of beginning, slot): work under way, and what was cancelled
        self._shares: list[tuple[float, int, Slot]] = []
        self._num_shares = 0  # without those that were cancelled
        self._work = self._at = 0.0  # the clock, and the time that it was set at
        self._num_begun = 0
        self._timer: Call | None = None
        self._speeds: list[float] = [1.0]

    # Draws

    def draw(self, input_size: float | None = None, worker: int = -1) -> Drawn:
        """The work of one call: seconds at the speed of one alone, and the size.

        Args:
            input_size: what the work depends on; None: its size is drawn with it.
            worker: whose machine does it; -1: none in particular.
        """
        use = self.use
        if worker >= use.num_workers:
            use.num_workers = worker + 1
        place = self._pick(worker)
        law = self.service.size_law
        if input_size is None:
            return Drawn(self._samples[place], self._sizes[place])
        use.low_size, use.high_size = min(use.low_size, input_size), max(use.high_size, input_size)
        if law is None or self._ratios is None:
            factor = input_size * self._per_size or 1.0
            return Drawn(self._samples[place] * factor, input_size)
        secs = law.base_secs + law.secs_per_unit * input_size
        return Drawn(max(0.0, secs * self._ratios[place]), input_size)

    def _pick(self, worker: int) -> int:
        pool = worker % len(self._pools) if self._pools and worker >= 0 else -1
        picks = self._picks.get(pool)
        if not picks:
            rng, num = self._rng, len(self._samples)
            if pool < 0:
                picks = rng.integers(num, size=_CHUNK).tolist()
            else:
                places = self._pools[pool]
                picks = places[rng.integers(len(places), size=_CHUNK)].tolist()
            self._picks[pool] = picks
        return picks.pop()

    # Work

    async def serve(self, work: float) -> None:
        """Wait until this work is done. Cancellation safe: it is then given up.

        A queue has no such order: what waits for a server when it is cancelled keeps its place.
        """
        self._begin()
        try:
            if self._is_shared:
                await self._share(work)
            elif self._is_queue:
                slot = Slot(self.kernel, self._what)
                await self.kernel.park(slot, self._queue_end(work))
            else:
                await self.kernel.sleep(work)
        finally:
            self.num_under_way -= 1

    def hold(self, work: float) -> None:
        """Let this work hold up the event loop until it is done."""
        self._begin()
        now = self.kernel.time
        if self._is_shared:
            self._advance(now)
            work /= self._speed(self._num_shares + 1)
        elif self._is_queue:
            work = self._queue_end(work) - now
        try:
            self.kernel.hold(work)
        finally:
            self.num_under_way -= 1

    def _begin(self) -> None:
        self.num_under_way += 1
        loads = self.use.loads
        loads[self.num_under_way] = loads.get(self.num_under_way, 0) + 1

    def _queue_end(self, work: float) -> float:
        """When the work is done that the next free server does from now on."""
        ends = max(self.kernel.time, self._free_at[0]) + work
        heapq.heapreplace(self._free_at, ends)
        return ends

    # The clock of work

    async def _share(self, work: float) -> None:
        kernel = self.kernel
        self._advance(kernel.time)
        self._num_begun += 1
        slot = Slot(kernel, self._what)
        heapq.heappush(self._shares, (self._work + work, self._num_begun, slot))
        self._num_shares += 1
        self._plan_next()
        try:
            await kernel.park(slot)
        finally:
            if not slot.is_woken:  # it was cancelled
                self._advance(kernel.time)
                if not slot.is_woken:
                    slot.wake()
                    self._num_shares -= 1
                self._plan_next()

    def _advance(self, now: float) -> None:
        """Let all that is done by now end, one after the other: each changes the speed."""
        shares = self._shares
        while shares:
            ends, _, slot = shares[0]
            if slot.is_woken:
                heapq.heappop(shares)
                continue
            speed = self._speed(self._num_shares)
            ends_at = self._at + max(0.0, ends - self._work) / speed
            if ends_at > now + _SAME * now:
                self._work += (now - self._at) * speed
                break
            self._work, self._at = max(ends, self._work), ends_at
            heapq.heappop(shares)
            self._num_shares -= 1
            slot.wake()
        self._at = now

    def _plan_next(self) -> None:
        """Have the next end fire, as the load has changed."""
        timer, shares = self._timer, self._shares
        if timer is not None and timer.due:
            self.kernel.forget(timer)
        while shares and shares[0][2].is_woken:
            heapq.heappop(shares)
        if shares:
            left = max(0.0, shares[0][0] - self._work) / self._speed(self._num_shares)
            self._timer = timer = Call(self._fire, self._what)
            self.kernel.push(self._at + left, timer)

    def _fire(self) -> None:
        self._advance(self.kernel.time)
        self._plan_next()

    def _speed(self, num: int) -> float:
        """Of each of so many that are under way; 1.0: of one alone."""
        speeds = self._speeds
        while num >= len(speeds):
            speeds.append(self.service.speed(len(speeds), assume=self._beyond))
        return speeds[num]
