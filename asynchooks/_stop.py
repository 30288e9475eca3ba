"""A stop that waiting tasks end at: a thread-safe flag and the slots to wake.

It knows nothing of why training stops or of what happens then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from ._engine import STOPPED, Slot


class Stop:
    """A flag that can be waited beside. Every method may be called from any thread."""

    __slots__ = ("_lock", "_slots", "is_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # invariant: while the flag is set, every slot in here has been woken
        self._slots: dict[Slot, None] = {}
        self.is_set = False

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            slots = list(self._slots)
        for slot in slots:
            slot.wake(STOPPED)

    def clear(self) -> None:
        self.is_set = False

    @contextmanager
    def ends(self, slot: Slot) -> Iterator[None]:
        """Within the block a stop wakes the slot with `STOPPED`; at once, if it came before."""
        with self._lock:
            self._slots[slot] = None
            is_set = self.is_set
        if is_set:
            slot.wake(STOPPED)
        try:
            yield
        finally:
            with self._lock:
                del self._slots[slot]


surrounding_stop: ContextVar[Stop | None] = ContextVar("asynchooks_stop", default=None)
"""The stop of the side task that is running, so that all its waits end with it."""


@contextmanager
def ends_at_stop(slot: Slot, stop: Stop | None) -> Iterator[None]:
    """Within the block `stop`, and the stop of the side task that is running, wake the slot."""
    around = surrounding_stop.get()
    with (
        nullcontext() if stop is None else stop.ends(slot),
        nullcontext() if around is None or around is stop else around.ends(slot),
    ):
        yield
