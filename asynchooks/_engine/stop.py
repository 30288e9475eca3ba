"""Stops: a thread-safe flag that ends waits, and the reason why training stopped.

What happens at a stop stands elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass

from .base import STOPPED, Slot


class Stop:
    """A flag that ends waits: it wakes slots. Every method may be called from any thread.

    Without a lock: a slot is added before the flag is looked at, and looked for after it is set;
    a list is changed and copied in one piece (under the GIL). While the flag is set, every slot
    has been woken.
    """

    __slots__ = ("_slots", "is_set")

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        for slot in list(self._slots):
            slot.wake(STOPPED)

    def clear(self) -> None:
        self.is_set = False

    def add(self, slot: Slot) -> None:
        """Have a stop wake the slot with `STOPPED`; at once, if it came before."""
        self._slots.append(slot)
        if self.is_set:
            slot.wake(STOPPED)

    def discard(self, slot: Slot) -> None:
        with suppress(ValueError):  # it is gone already
            self._slots.remove(slot)


class LostPeer(Stop):
    """Set when a backend, or a step on it, is lost: a call on it would be waited for in vain."""

    __slots__ = ("_reason",)

    def __init__(self) -> None:
        super().__init__()
        self._reason: Callable[[], Exception] = _no_reason

    def report(self, reason: Callable[[], Exception]) -> None:
        """Have every call that is waited for, now or later, raise an error made by `reason`."""
        self._reason = reason
        self.set()

    def error(self) -> Exception:
        """A new error each time: several tasks may raise it."""
        return self._reason()


def _no_reason() -> Exception:
    return RuntimeError("nothing was lost")


surrounding_stop: ContextVar[Stop | None] = ContextVar("asynchooks_stop", default=None)
"""The stop of the side task that is running, so that all its waits end with it."""


class EndsAtStop:
    """`with`: a stop wakes the slot: the one given, and that of the side task that is running.

    A class, because a thousand waiters leave it at once: as generators it took a fifth of all.
    """

    __slots__ = ("_around", "_slot", "_stop")

    def __init__(self, slot: Slot, stop: Stop | None) -> None:
        self._slot = slot
        self._stop = stop
        self._around = surrounding_stop.get()

    def __enter__(self) -> None:
        if self._stop is not None:
            self._stop.add(self._slot)
        if self._around is not None:
            self._around.add(self._slot)

    def __exit__(self, *_: object) -> None:
        if self._stop is not None:
            self._stop.discard(self._slot)
        if self._around is not None:
            self._around.discard(self._slot)


@dataclass(frozen=True)
class StopReason:
    """What stopped a session, and why. Made where the stop is asked for; the first one stands.

    All workers that are stopped by one cause have the same.

    Args:
        who: what asked for it: "TimeLimitHook", "the side task 'watch'", "the block", ...
        why: in a few words.
        error: the error that leaves the session for it, if any.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=9)], creator) as session:
            while not session.should_stop():
                await session.run("loss")
        print(session.stop_reason)  # the limit: global_step is at 9 of 9
    """

    who: str
    why: str
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.who}: {self.why}"


def reason_for(
    error: BaseException | None, reason: StopReason | str | BaseException | None, who: str
) -> StopReason:
    """The reason that was given, or the best that can be said without one.

    Raises:
        TypeError: it is no reason.
    """
    if isinstance(reason, StopReason):
        return reason
    if isinstance(reason, BaseException):
        error, reason = reason, None
    if not isinstance(reason, (str, type(None))):
        raise TypeError(f"reason is {reason!r}; give a text, an exception, or nothing")
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        who = f"{who} in the thread {thread.name!r}"
    return StopReason(who, reason or ("no reason given" if error is None else repr(error)), error)
