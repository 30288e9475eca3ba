"""Refuses real sleep to a simulated program: it takes real time, and none of the simulation's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from .._errors import OutsideWorkError


@contextmanager
def no_real_sleep() -> Iterator[None]:
    """Within the block, `time.sleep` is refused to the simulation's own thread."""
    thread, real = threading.get_ident(), time.sleep

    def sleep(secs: float) -> None:
        if threading.get_ident() == thread:
            raise OutsideWorkError(
                f"time.sleep({secs!r}) in a simulation takes real time and no virtual time; use "
                "`await simulation.sleep(secs)`"
            )
        real(secs)

    time.sleep = cast(Any, sleep)
    try:
        yield
    finally:
        time.sleep = real
