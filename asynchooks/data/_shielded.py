"""shielded: a resource of one item, created and given up whole, whatever is cancelled."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from .. import _check as check
from .._engine.base import TIMED_OUT, Engine, ShieldedScope, Slot, async_block
from .._engine.current import current_engine
from .._errors import add_note, shown

R = TypeVar("R")


@async_block("shielded(manager)")
async def shielded(
    manager: AbstractAsyncContextManager[R], *, limit_secs: float = 30.0
) -> AsyncIterator[R]:
    """Enter and leave an async context manager whole: no cancellation comes in between.

    For what stays behind on a server when its creation or deletion is interrupted: a sandbox, a
    session of an inference engine. A cancellation that comes while it is entered is raised at the
    first wait of the block instead; one that comes while it is left, behind the block.

    Args:
        manager: gives the resource when it is entered, and deletes it when it is left.
        limit_secs: what leaving it may take, > 0; then it is cancelled. Entering has no limit: a
            creation that may hang has a timeout of its own.

    Raises:
        TypeError: `manager` is no async context manager.
        TimeoutError: leaving it took longer, and the block raised nothing; else a note says it.

    Example:
        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def sandbox():
            yield "a sandbox"  # create it before, delete it behind

        async with shielded(sandbox()) as box:
            assert box == "a sandbox"
    """
    check.seconds("limit_secs", limit_secs)
    check.instance(
        "manager", manager, AbstractAsyncContextManager,
        "an async context manager, such as a call of a function decorated with "
        "contextlib.asynccontextmanager",
    )  # fmt: skip
    engine = current_engine()
    raised: BaseException | None = None
    # one scope around all of it, shielded or not: the manager may open scopes that it closes later
    with engine.shielded(math.inf) as scope:
        resource = await manager.__aenter__()
        scope.shield = False
        try:
            yield resource
        except BaseException as error:
            raised = error
        scope.shield = True
        has_left = Slot(engine, "a resource to be left")
        engine.start(_cancel_late, engine, has_left, limit_secs, scope)
        try:
            traceback = None if raised is None else raised.__traceback__
            if await manager.__aexit__(type(raised) if raised else None, raised, traceback):
                raised = None
        finally:
            has_left.wake()
    if scope.cancelled_caught:
        late = f"leaving {shown(manager)} took more than {limit_secs:g} s, and was cancelled"
        if raised is None:
            raise TimeoutError(late)
        add_note(raised, late)
    if raised is not None:
        raise raised


async def _cancel_late(
    engine: Engine, has_left: Slot, limit_secs: float, scope: ShieldedScope
) -> None:
    if await engine.park(has_left, engine.now() + limit_secs) is TIMED_OUT:
        scope.cancel()
