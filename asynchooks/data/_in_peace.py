"""Waiting for what is ending, however often one is cancelled meanwhile."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from .._engine.base import Engine


async def wait_in_peace(engine: Engine, wait: Callable[[], Awaitable[None]]) -> None:
    """Wait to the end; what is waited for sees to it that this comes.

    A shield does not keep out asyncio's own `task.cancel()`: that one leaves when the wait is
    over, and a second one at once, as in `WorkThread.run`.
    """
    with engine.shielded(math.inf):
        try:
            await wait()
        except BaseException:
            await wait()
            raise
