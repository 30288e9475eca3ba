"""A computation in a task of its own, which ends early where it has become useless."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from .._engine import Slot, current_engine
from .._work_thread import Outcome
from ._values import ABANDONED

Watch = Callable[[Slot], Callable[[], object]]
"""Has the slot woken with `ABANDONED` in time; returns what forgets it."""


async def compute_unless(
    watch: Watch, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
) -> tuple[bool, Any]:
    """Run `fn(*args)` until it ends, or cancel it when it is abandoned.

    It has ended when this returns or raises.
    """
    engine = current_engine()
    slot = Slot(engine, f"the end of {getattr(fn, '__qualname__', fn)!r}, or an update")
    outcome: Outcome | None = None

    async def run() -> None:
        nonlocal outcome
        try:
            outcome = Outcome(await fn(*args))
        except (Exception, KeyboardInterrupt, SystemExit, BaseExceptionGroup) as error:
            outcome = Outcome(error=error)
        except BaseException as cancellation:
            if not slot.is_woken:  # it is not ours: somebody else cancelled what `fn` waits for
                outcome = Outcome(error=cancellation)
            raise
        finally:
            slot.wake()

    forget = watch(slot)
    if slot.is_woken:
        forget()
        return False, None
    task = engine.start(run)
    try:
        await engine.park(slot)
    finally:
        forget()
        if outcome is None:
            task.cancel()
            slot.wake(ABANDONED)  # by whom the cancellation is ours
        with engine.shielded(float("inf")):
            await task.wait()
    if slot.value is ABANDONED and (outcome is None or outcome.error is None):
        return False, None
    assert outcome is not None
    return True, outcome.unwrap()
