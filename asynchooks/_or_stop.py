"""or_stop: a foreign wait that ends when training does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ._engine import STOPPED, Engine, Slot
from ._errors import StopTraining
from ._stop import EndsAtStop, Stop
from ._work_thread import Outcome

T = TypeVar("T")


async def or_stop(
    engine: Engine,
    stop: Stop,
    drive: Callable[..., Awaitable[Any]],
    fn: Callable[..., Awaitable[T]],
    *args: Any,
) -> T:
    """Run `fn(*args)` in a task of its own until it ends, or cancel it at a stop.

    `drive(fn, args)` awaits it in what surrounds the session.

    Cancellation cancels it, too; in both cases it has ended when this returns.

    Raises:
        StopTraining: a stop came first, or had come before.
        BaseException: what `fn` raised.
    """
    if not callable(fn):
        raise TypeError(f"or_stop got {fn!r}; give an async function, then its arguments")
    if stop.is_set:
        raise StopTraining(f"a stop was requested before {name_of(fn)} was called")
    slot = Slot(engine, f"{name_of(fn)} or a stop")
    outcome: Outcome | None = None

    async def run() -> None:
        nonlocal outcome
        try:
            outcome = Outcome(await drive(fn, args))
        except (Exception, KeyboardInterrupt, SystemExit, BaseExceptionGroup) as error:
            outcome = Outcome(error=error)
        except BaseException as cancellation:
            if not slot.is_woken:  # it is not ours: somebody else cancelled what `fn` waits for
                outcome = Outcome(error=cancellation)
            raise
        finally:
            slot.wake()

    task = engine.start(run)
    try:
        with EndsAtStop(slot, stop):
            await engine.park(slot)
    finally:
        task.cancel()
        with engine.shielded(float("inf")):
            await task.wait()
    if outcome is not None and (slot.value is not STOPPED or outcome.error is not None):
        value: T = outcome.unwrap()
        return value
    raise StopTraining(f"a stop was requested while waiting for {name_of(fn)}")


def name_of(fn: object) -> str:
    """What to call it in messages; the whole object of a bound method may be large."""
    return str(getattr(fn, "__qualname__", repr(fn)))
