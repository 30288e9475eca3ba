"""Which engine the running task waits through."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import anyio.lowlevel

from .base import Engine

engine_in_use: ContextVar[Engine | None] = ContextVar("asynchooks_engine", default=None)


_real_time: anyio.lowlevel.RunVar[Engine] = anyio.lowlevel.RunVar("asynchooks_engine")


def current_engine() -> Engine:
    """The engine of the running task: the one installed, else real time on its event loop."""
    installed = engine_in_use.get()
    if installed is not None and not installed.is_elsewhere:
        return installed
    try:
        engine = _real_time.get(None)
    except RuntimeError:  # no event loop runs in this thread
        if installed is not None:
            return installed
        raise
    if engine is None:
        from .real_time import new_engine

        engine = new_engine()
        _real_time.set(engine)
    return engine


def engine_if_any() -> Engine | None:
    """`current_engine`; None in a thread without an event loop."""
    try:
        return current_engine()
    except RuntimeError:
        return None


@contextmanager
def use_engine(engine: Engine) -> Iterator[None]:
    """Within the block, and in tasks and threads started there, wait through this engine."""
    token = engine_in_use.set(engine)
    try:
        yield
    finally:
        engine_in_use.reset(token)


system_now = time.monotonic
"""Seconds on the system's clock, alike in all threads: trio's begins anywhere."""


def now() -> float:
    """Seconds on the current engine's clock; on the system's where no engine is running."""
    engine = engine_if_any()
    return system_now() if engine is None else engine.now()
