"""What a simulation changes in the process while it runs: `time.sleep`, garbage collection."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from ..._errors import OutsideWorkError

_YOUNG = 100_000
"""New objects after which the youngest generation is collected; Python's own is 700."""


class _SleepGuard:
    """Replaces `time.sleep` while one simulation runs."""

    def __init__(self) -> None:
        self.original: Any = time.sleep  # or the guard of another thread's simulation
        self.is_over = False
        self._thread = threading.get_ident()

    def __call__(self, secs: float) -> None:
        if not self.is_over and threading.get_ident() == self._thread:
            raise OutsideWorkError(
                f"time.sleep({secs!r}) in a simulation takes real time and no virtual time; use "
                "`await simulation.sleep(secs)`"
            )
        self.original(secs)


@contextmanager
def no_real_sleep() -> Iterator[None]:
    """Within the block `time.sleep` raises an error in the simulation's own thread.

    A simulated program that slept would take real time, and no virtual time.
    """
    guard = _SleepGuard()
    time.sleep = cast(Any, guard)
    try:
        yield
    finally:
        guard.is_over = True
        # simulations of several threads end in any order: the last one removes all guards
        while isinstance(top := cast(Any, time.sleep), _SleepGuard) and top.is_over:
            time.sleep = top.original


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within the block cyclic garbage is collected after 100,000 new objects.

    The objects of thousands of waiting tasks outlive Python's own 700; collecting that often took
    a fifth of the time at 10,000 workers. Where collection is off or rarer, it stays so.
    """
    young, middle, old = gc.get_threshold()
    if 0 < young < _YOUNG:
        gc.set_threshold(_YOUNG, middle, old)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
