"""Station: where one kind of work is done in virtual time, and Use: what of it a plan has used.

They know of no program and of no trace.

Who is next, and when, depends on the kind: work that depends on nothing sleeps; servers with a
queue take it in order; a shared service does all that is under way at once, at a speed that falls
with the load. That one is kept by a clock of work, which is how much each one under way has had
since the beginning: one addition for each change of the load, however many share.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from .._engine.base import Slot
from ..simulation.kernel._kernel import Call, Kernel
from ._service import Dependence, Service

_SAME = 1e-12
"""Shares of one are equal up to this."""
_OUTSIDE = 0.02
"""Share of work that began at a load that was not recorded: above it that counts."""
_BEYOND_SIZES = 0.25
"""Of the range of recorded sizes, by which sizes may be outside of it."""
_MANY = 15
"""Samples that each worker needs for the slowest of all to be known."""


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
    """Under which loads, sizes and workers a service was used, and how far beyond the record.

    Runs of one prediction have one in common, as if they had been one run.
    """

    service: Service
    """As it was recorded; each run draws from one that might as well have been."""
    loads: Counter[int] = field(default_factory=Counter)
    """How often that many were under way as work began, that included."""
    low_size: float = math.inf
    high_size: float = -math.inf
    num_workers: int = 0
    """One more than the greatest number of a worker."""

    def beyond_load(self) -> str:
        """A note if a service that may be shared was used at a load that was not recorded."""
        service, most = self.service, max(self.loads, default=0)
        if service.dependence.is_queue or service.is_own or most <= 1:
            return ""
        loads, nums = np.array(sorted(self.loads.items())).T
        low, high = 0.98 * service.load_low - 0.5, 1.02 * service.load_high + 0.5
        share = float(nums[(loads < low) | (loads > high)].sum() / nums.sum())
        if share <= _OUTSIDE:
            return ""
        used = np.quantile(np.repeat(loads, nums), (0.01, 0.99), method="nearest").tolist()
        return (
            f"{service.name}: {100 * share:.0f} % of the work begins at a load that was not "
            f"recorded: {' to '.join(map(str, dict.fromkeys(used)))} under way, recorded "
            f"{service.load_low:.0f} to {service.load_high:.0f}"
        )

    def beyond_sizes(self) -> str:
        """A note if inputs were of other sizes than those recorded."""
        service = self.service
        sizes = service.sizes[np.isfinite(service.sizes)]
        if not len(sizes):
            return ""
        low, high = float(sizes.min()), float(sizes.max())
        # several runs have more extreme sizes than one recording, by chance
        more = _BEYOND_SIZES * (high - low) + 1e-9 * high
        if self.low_size >= low - more and self.high_size <= high + more:
            return ""
        unknown = "; how long others take is not known" if service.size_law is None else ""
        return (
            f"{service.name}: sizes {self.low_size:g} to {self.high_size:g}, recorded {low:g} to "
            f"{high:g}{unknown}"
        )

    def beyond_workers(self) -> str:
        """A note if there were more workers than the recorded ones say something of."""
        service, num_samples = self.service, len(self.service.samples)
        num_known = len(service.known_workers())
        if 0 < num_known < self.num_workers:
            return (
                f"{service.name}: {self.num_workers} workers, of which {num_known} were recorded, "
                "and those differ; further ones are taken to be as these, one after the other"
            )
        if self.num_workers > 1 and num_samples < _MANY * self.num_workers:
            return (
                f"{service.name}: {num_samples} samples are few for the slowest of "
                f"{self.num_workers} workers; {_MANY} for each are enough"
            )
        return ""


class Station:
    """Does one kind of work, of all tasks of a simulation; a plan makes it at its first call.

    Args:
        kernel: of the simulation.
        service: what is drawn from.
        rng: draws it.
        use: is told of each call.
    """

    def __init__(
        self, kernel: Kernel, service: Service, rng: np.random.Generator, use: Use
    ) -> None:
        self.kernel, self.service, self._rng, self.use = kernel, service, rng, use
        self._what = f"the end of {service.name}"
        self._samples: list[float] = service.samples.tolist()
        self._sizes: list[float] = service.sizes.tolist()
        # of each worker that was recorded the places of its samples; empty if workers are alike
        workers = service.workers
        self._pools: list[list[int]] = [
            np.flatnonzero(workers == each).tolist() for each in service.known_workers()
        ]
        self.num_under_way = 0
        self._is_queue = service.dependence is Dependence.QUEUE
        self._is_shared = service.is_bracketed or (
            service.dependence is Dependence.SHARED and service.slowdown > 0
        )
        self._free_at = [0.0] * service.num_servers
        # work under way: (its end by the clock of work, order of beginning, slot)
        self._shares: list[tuple[float, int, Slot]] = []
        self._work = self._at = 0.0  # the clock, and the time that it was set at
        self._num_begun = 0
        self._timer: Call | None = None
        self._speed = cache(service.speed)  # of each of so many that are under way

    # Draws

    def draw(self, input_size: float = math.nan, worker: int = -1) -> Drawn:
        """The work of one call: seconds at the speed of one alone, and the size.

        Args:
            input_size: what the work depends on; NaN: its size is drawn with it.
            worker: whose machine does it; -1: none in particular.
        """
        use = self.use
        if worker >= use.num_workers:
            use.num_workers = worker + 1
        pools = self._pools
        places = pools[worker % len(pools)] if pools and worker >= 0 else range(len(self._samples))
        place = places[self._rng.integers(len(places))]
        if math.isnan(input_size):
            return Drawn(self._samples[place], self._sizes[place])
        use.low_size, use.high_size = min(use.low_size, input_size), max(use.high_size, input_size)
        law = self.service.size_law
        if law is None:
            return Drawn(self._samples[place], input_size)
        return Drawn(law.secs(input_size) * float(law.ratios[place]), input_size)

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
            work /= self._speed(len(self._shares) + 1)
        elif self._is_queue:
            work = self._queue_end(work) - now
        try:
            self.kernel.hold(work)
        finally:
            self.num_under_way -= 1

    def _begin(self) -> None:
        self.num_under_way += 1
        self.use.loads[self.num_under_way] += 1

    def _queue_end(self, work: float) -> float:
        """When the work is done that the next free server does from now on."""
        ends = max(self.kernel.time, self._free_at[0]) + work
        heapq.heapreplace(self._free_at, ends)
        return ends

    # The clock of work

    async def _share(self, work: float) -> None:
        kernel, shares = self.kernel, self._shares
        self._advance(kernel.time)
        self._num_begun += 1
        slot = Slot(kernel, self._what)
        share = self._work + work, self._num_begun, slot
        heapq.heappush(shares, share)
        self._plan_next()
        try:
            await kernel.park(slot)
        finally:
            if not slot.is_woken:  # it was cancelled
                self._advance(kernel.time)
                if not slot.is_woken:
                    shares.remove(share)
                    heapq.heapify(shares)
                self._plan_next()

    def _advance(self, now: float) -> None:
        """Let all that is done by now end, one after the other: each changes the speed."""
        shares = self._shares
        while shares:
            ends, _, slot = shares[0]
            speed = self._speed(len(shares))
            ends_at = self._at + max(0.0, ends - self._work) / speed
            if ends_at > now + _SAME * now:
                self._work += (now - self._at) * speed
                break
            self._work, self._at = max(ends, self._work), ends_at
            heapq.heappop(shares)
            slot.wake()
        self._at = now

    def _plan_next(self) -> None:
        """Have the next end fire, as the load has changed."""
        timer, shares = self._timer, self._shares
        if timer is not None and timer.due:
            self.kernel.forget(timer)
        if shares:
            left = max(0.0, shares[0][0] - self._work) / self._speed(len(shares))
            self._timer = timer = Call(self._fire, self._what)
            self.kernel.push(self._at + left, timer)

    def _fire(self) -> None:
        self._advance(self.kernel.time)
        self._plan_next()
