"""Stops: what ends waits, why, and for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from .._errors import add_note
from .base import STOPPED, Slot


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


class Stop:
    """A stop that ends waits. Every method may be called from any thread, and in signal handlers.

    Stops form a tree, as what they stop does: all workers of a model, a session, its present raw
    session with the run under way. A stop that is set sets all below it; which one is set is the
    scope of the stop, and a wait ends by the one that it was given. The first reason and the first
    error stand; an error stays with the stop that it was given to, as it leaves one session.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may interrupt any method
        # Each changes in one piece, and what comes in looks at `is_set` afterwards: so no lock.
        self._slots: dict[Slot, None] = {}
        self._children: dict[Stop, None] = {}
        self.parent: Stop | None = None
        self.is_set = False
        self.is_for_good = False  # no recovery takes it back
        self.is_ending = False  # what it belongs to ends: a side task may leave by StopTraining
        self.reason: StopReason | None = None
        self.error: BaseException | None = None
        # Where there is a list, each reason to set this stop, or one right below it, is put there
        # with its error, and sets nothing. The end of a session has no reason, and sets it.
        self.held: list[tuple[StopReason, BaseException | None]] | None = None

    def join(self, parent: Stop) -> None:
        """Be stopped with the parent from now on; at once, if it is set."""
        self.parent = parent
        parent._children[self] = None
        if parent.is_set:
            self.set(parent.reason, for_good=parent.is_for_good)

    def leave(self) -> None:
        """Be stopped with the parent no more."""
        if self.parent is not None:
            self.parent._children.pop(self, None)
            self.parent = None

    def set(
        self,
        reason: StopReason | None = None,
        error: BaseException | None = None,
        *,
        for_good: bool = True,
        apart_from: Stop | None = None,
    ) -> None:
        """End all waits that were given this stop, or one below it, `apart_from` one of these."""
        held = self.held
        if held is None and self.parent is not None:
            held = self.parent.held
        if held is not None and reason is not None:
            held.append((reason, error))
            return
        with self._lock:
            self.reason = self.reason or reason
            if error is not None and self.error not in (None, error):
                who = "the coordinator" if reason is None else reason.who
                add_note(self.error, f"then, in {who}: {error!r}")
            self.error = self.error or error
            self.is_for_good = self.is_for_good or for_good
            self.is_set = True
        for slot in list(self._slots):
            slot.wake(STOPPED)
        for child in list(self._children):
            if child is not apart_from:
                child.set(self.reason, for_good=for_good)

    def note(self, reason: StopReason | None) -> None:
        """What ended training, where nothing had asked for it: the first reason stands."""
        self.reason = self.reason or reason

    def clear(self) -> None:
        """Take it back, for what comes later: waits that it has ended stay ended."""
        with self._lock:
            self.is_set = self.is_for_good = False
            self.reason = self.error = None

    def add(self, slot: Slot) -> None:
        """Have a stop wake the slot with `STOPPED`; at once, if it came before."""
        self._slots[slot] = None
        if self.is_set:
            slot.wake(STOPPED)

    def discard(self, slot: Slot) -> None:
        """Wake the slot no more."""
        self._slots.pop(slot, None)


class LostPeer(Stop):
    """Set when a backend, or a step on it, is lost: a call on it would be waited for in vain."""

    error_now: Callable[[], Exception]
    """Makes a new error each time, as several tasks may raise it."""

    def report(self, reason: Callable[[], Exception]) -> None:
        """Have every call that is waited for, now or later, raise an error made by `reason`."""
        self.error_now = reason
        self.set()


surrounding_stop: ContextVar[Stop | None] = ContextVar("asynchooks_stop", default=None)
"""The stop of the side task that is running, so that all its waits end with it."""


class EndsAtStop:
    """`with`: a stop wakes the slot: those given, and that of the side task that is running.

    A class, because a thousand waiters leave it at once: as generators it took a fifth of all.
    """

    __slots__ = ("_slot", "_stops")

    def __init__(self, slot: Slot, *stops: Stop | None) -> None:
        self._slot = slot
        self._stops = [*filter(None, (*stops, surrounding_stop.get()))]

    def __enter__(self) -> None:
        for stop in self._stops:
            stop.add(self._slot)

    def __exit__(self, *_: object) -> None:
        for stop in self._stops:
            stop.discard(self._slot)
