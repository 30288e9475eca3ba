"""How late the event loop is, as a task beside the workers sees it."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel

TIMER_SECS = 0.01


class Watch:
    """The worst that a task of its own saw. Use one for the timer and another for the turns.

    A task that asks for every turn never lets the event loop sleep: beside busy workers it does
    not sleep anyway, but a timer measured at the same time would be served sooner.
    """

    def __init__(self) -> None:
        self.worst_secs = 0.0

    async def timer(self) -> None:
        """For ever: how long after its time a timer of `TIMER_SECS` lets its task go on."""
        while True:
            due = time.perf_counter() + TIMER_SECS
            await anyio.sleep(TIMER_SECS)
            self.worst_secs = max(self.worst_secs, time.perf_counter() - due)

    async def turns(self) -> None:
        """For ever: how long the loop takes to come back to a task that only yields."""
        last = time.perf_counter()
        while True:
            await anyio.lowlevel.checkpoint()
            now = time.perf_counter()
            self.worst_secs = max(self.worst_secs, now - last)
            last = now
