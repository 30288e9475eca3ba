"""A computation in a task of its own, which is cancelled when it has become useless."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from .._engine.base import Sentinel, Slot
from .._engine.current import current_engine
from .._stopping.tasks import SlotCall

ABANDONED = Sentinel("ABANDONED")
"""What `ParameterServer.watch_update` wakes a slot with."""

Watch = Callable[[Slot], Callable[[], object]]
"""Registers a slot to be woken with `ABANDONED`; returns a function that removes it."""


async def compute_unless(
    watch: Watch, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
) -> tuple[bool, Any]:
    """Run `fn(*args)` until it ends, or cancel it when it is abandoned.

    It has ended when this returns or raises.

    Returns:
        (True, its value), or (False, None) if it was abandoned.
    """
    engine = current_engine()
    slot = Slot(engine, f"the end of {getattr(fn, '__qualname__', fn)!r}, or an update")
    call = SlotCall(engine, slot)
    remove = watch(slot)
    if slot.is_woken:
        remove()
        return False, None
    task = engine.start(call.run, fn, *args)
    try:
        await engine.park(slot)
    finally:
        remove()
        if call.outcome is None:
            task.cancel()
            slot.wake(ABANDONED)  # marks the cancellation as ours
        with engine.shielded(float("inf")):
            await task.wait()
    outcome = call.outcome
    if slot.value is ABANDONED and (outcome is None or outcome.error is None):
        return False, None
    assert outcome is not None
    return True, outcome.unwrap()
