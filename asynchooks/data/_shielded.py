"""shielded: a resource of one item, created and given up whole, whatever is cancelled."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

from .. import _check as check
from .._engine.base import Engine, ShieldedScope, Slot, async_block
from .._engine.current import current_engine
from .._errors import add_note, shown
from .._stopping.session_stop import interruption

R = TypeVar("R")

_CANCEL_SECS = 1.0
"""What leaving gets to end once it was cancelled."""


@async_block("shielded(manager)")
async def shielded(
    manager: AbstractAsyncContextManager[R], *, limit_secs: float = 30.0
) -> AsyncIterator[R]:
    """Enter and leave an async context manager whole: no cancellation comes in between.

    For what stays behind on a server when its creation or deletion is interrupted: a sandbox, a
    session of an inference engine. The manager is entered and left in a task of its own, which no
    cancellation of the caller reaches: neither that of a task group, nor `task.cancel()`. One that
    comes while it is entered is raised when it has been left again; one that comes while it is
    left, behind the block. Context variables that the manager sets are not seen in the block. A
    task group that the manager holds open is not cancelled with the block; if it fails, the block
    is cancelled, and its error leaves.

    Args:
        manager: gives the resource when it is entered, and deletes it when it is left.
        limit_secs: what leaving it may take, > 0; then it is cancelled. Entering has no limit: a
            creation that may hang has a timeout of its own.

    Raises:
        TypeError: `manager` is no async context manager.
        TimeoutError: leaving it took longer, and the block raised nothing; else a note says it.
        BaseException: what entering or leaving it raised.

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
    holder = _Holder(engine, manager)
    task = engine.start(holder.hold)
    raised: BaseException | None = None
    try:
        raised = await _uncancelled(engine, partial(engine.park, holder.has_entered))
        if not holder.is_held:
            if raised is not None and holder.error is not None:
                add_note(raised, f"then, entering {shown(manager)}: {holder.error!r}")
            raise raised or holder.error or RuntimeError(f"{shown(manager)} was not entered")
        raised = raised or await interruption(engine.checkpoint())
        is_cancelled = raised is not None
        if raised is None:
            with engine.shielded(math.inf) as scope:
                scope.shield, holder.block = False, scope
                try:
                    if holder.has_failed:
                        scope.cancel()
                    yield holder.resource
                except BaseException as error:
                    raised, is_cancelled = error, engine.failure_in(error) is None
            if holder.has_failed and is_cancelled:
                raised = await interruption(engine.checkpoint())  # by others as well
                is_cancelled = raised is not None
    finally:
        holder.leave.wake(raised)
    until = engine.now() + limit_secs
    cancelled = await _uncancelled(engine, partial(task.wait, until))
    if not holder.has_left:
        task.cancel()
        late = f"leaving {shown(manager)} took more than {limit_secs:g} s, and was cancelled"
        again = await _uncancelled(engine, partial(task.wait, until + _CANCEL_SECS))
        cancelled = cancelled or again
        if raised is None:
            raise TimeoutError(late)
        add_note(raised, late)
    elif holder.error is not None and holder.error is not raised:
        raise holder.error
    elif holder.swallows and not is_cancelled:
        raised = None
    if raised is not None or cancelled is not None:
        raise raised or cancelled or AssertionError


class _Holder:
    """Holds the resource of a manager, in a task of its own."""

    def __init__(self, engine: Engine, manager: AbstractAsyncContextManager[Any]) -> None:
        self._engine = engine
        self._manager = manager
        self.has_entered = Slot(engine, f"{shown(manager)} to be entered")
        self.leave = Slot(engine, "the end of a block")  # gets what the block raised
        self.resource: Any = None
        self.block: ShieldedScope | None = None
        self.is_held = self.has_left = self.swallows = False
        self.has_failed = False  # within the block: of a task group that the manager holds open
        self.error: BaseException | None = None  # of entering, or of leaving

    async def hold(self) -> None:
        try:
            await self._hold()
        except BaseException as error:
            self.error = error
            if self._engine.failure_in(error) is None:
                raise
            self.has_left = self.is_held
        finally:
            self.has_entered.wake()

    async def _hold(self) -> None:
        manager = self._manager
        self.resource = await manager.__aenter__()
        self.is_held = True
        self.has_entered.wake()
        # an event loop that is closed cancels this task, too: it leaves then as well
        raised = await interruption(self._engine.park(self.leave))
        self.has_failed = raised is not None
        if self.has_failed and self.block is not None:
            self.block.cancel()
        raised = raised or self.leave.value
        kind = None if raised is None else type(raised)
        traceback = None if raised is None else raised.__traceback__
        self.swallows = bool(await manager.__aexit__(kind, raised, traceback))
        self.has_left = True


async def _uncancelled(
    engine: Engine, wait: Callable[[], Awaitable[object]]
) -> BaseException | None:
    """Wait however often the task is cancelled; returns the first cancellation.

    A shield holds back no `task.cancel()` of asyncio.
    """
    cancelled: BaseException | None = None
    with engine.shielded(math.inf):
        while (error := await interruption(wait())) is not None:
            if engine.failure_in(error) is not None:
                raise error
            cancelled = cancelled or error
    return cancelled
