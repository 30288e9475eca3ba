"""Refuses real sleep to a simulated program: it takes real time, and none of the simulation's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from .._errors import OutsideWorkError


class _Guard:
    """Stands in for `time.sleep` while one simulation runs."""

    def __init__(self) -> None:
        self.real: Any = time.sleep  # or the guard of another thread's simulation
        self.is_over = False
        self._thread = threading.get_ident()

    def __call__(self, secs: float) -> None:
        if not self.is_over and threading.get_ident() == self._thread:
            raise OutsideWorkError(
                f"time.sleep({secs!r}) in a simulation takes real time and no virtual time; use "
                "`await simulation.sleep(secs)`"
            )
        self.real(secs)


@contextmanager
def no_real_sleep() -> Iterator[None]:
    """Within the block, `time.sleep` is refused to the simulation's own thread."""
    guard = _Guard()
    time.sleep = cast(Any, guard)
    try:
        yield
    finally:
        guard.is_over = True
        # simulations of several threads end in any order: the last one takes all guards away
        while isinstance(top := cast(Any, time.sleep), _Guard) and top.is_over:
            time.sleep = top.real
