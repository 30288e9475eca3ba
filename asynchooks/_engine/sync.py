"""Locks: for tasks of one event loop, and for calls that must not overlap in any thread.

They run nothing, and know neither steps nor hooks.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from .._errors import OverlappingCallError, StopTraining
from .base import STOPPED, TIMED_OUT, Engine, Slot
from .current import current_engine, engine_if_any, system_now
from .stop import EndsAtStop, LostPeer, Stop

logger = logging.getLogger("asynchooks")

_PATIENCE_SECS = 30.0
"""How long a call may take until the log says that others wait for it."""


class Lock:
    """`async with lock:` lets one task in at a time, in order of asking. Cancellation safe.

    Args:
        what: it is, for people.
        hint: what the log says where a task waits for long; "" where that is usual.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        self._what = what
        self._hint = hint
        self._is_held = False
        self._queue: deque[Slot] = deque()

    async def __aenter__(self) -> None:
        if not self.enter_now():
            await self.wait()

    def enter_now(self) -> bool:
        """Enter if no task is inside, and return whether that was so; then call `leave`."""
        if self._is_held:
            return False
        self._is_held = True
        return True

    async def wait(self) -> None:
        """Enter in turn, after the tasks that wait already."""
        engine = current_engine()
        slot = Slot(engine, self._what)
        self._queue.append(slot)
        try:
            until = engine.now() + _PATIENCE_SECS if self._hint else math.inf
            if await engine.park(slot, until) is TIMED_OUT:
                logger.warning(
                    "A task has waited for %s for %g s, and waits on. %s",
                    self._what,
                    _PATIENCE_SECS,
                    self._hint,
                )
                again = Slot(engine, self._what)
                self._queue[self._queue.index(slot)] = again
                slot = again
                await engine.park(slot)
        except BaseException:
            if slot.is_woken:  # the lock came together with the cancellation: pass it on
                self.leave()
            else:
                self._queue.remove(slot)
            raise

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        if self._queue:
            self._queue.popleft().wake()
        else:
            self._is_held = False


class Condition:
    """Tasks that wait for another task's run or close to end."""

    slots: tuple[Slot, ...] = ()

    async def wait_until(
        self, is_done: Callable[[], bool], what: str, until: float = math.inf
    ) -> None:
        """Return when it is done, or the time has come on the engine's clock."""
        engine = current_engine()
        while not is_done() and engine.now() < until:
            slot = Slot(engine, what)
            self.slots += (slot,)
            await engine.park(slot, until)

    def notify(self) -> None:
        """Have all of them check again."""
        slots, self.slots = self.slots, ()
        for slot in slots:
            slot.wake()


_under_way: ContextVar[tuple[Hold, ...]] = ContextVar("asynchooks_calls_under_way", default=())
"""Of the calls that the running code is part of, in its thread or in tasks that it started."""


class Hold:
    """One call's place in the queue, then its lock until `end`. `CallLock` makes it.

    The task that asked for it ends it, or gives it to the thread that makes the call. One that is
    abandoned keeps the lock until that thread ends it. `with hold:` is the call.
    """

    _token: Token[tuple[Hold, ...]]

    def __init__(self, lock: CallLock) -> None:
        self.lock = lock
        self.wake: Callable[[], object] = lambda: None  # its task or thread looks again
        self.has_begun = self.is_over = False
        self.asked_at = system_now()
        self.abandoned_at = math.inf

    def __enter__(self) -> None:
        """The call begins, in this thread; OverlappingCallError if it was abandoned before."""
        with self.lock.mutex:
            if self.abandoned_at < math.inf:
                what = self.lock.what
                raise OverlappingCallError(f"a call was abandoned before it began: {what}")
            self.has_begun, self.lock.thread = True, threading.get_ident()
        self._token = _under_way.set((*_under_way.get(), self))

    def __exit__(self, *_: object) -> None:
        _under_way.reset(self._token)
        self.end()

    def around(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        """`fn` as the call of this hold, for the thread that makes it."""

        def call() -> Any:
            with self:
                return fn()

        return call

    def end(self) -> None:
        """The call has returned, or is not made; from any thread, and more than once."""
        lock = self.lock
        with lock.mutex:
            if self.is_over:
                return
            self.is_over = True
            if lock.queue and lock.holder is not self:  # it waits; `NO_LOCK` has no queue
                lock.queue.remove(self)
                return
            lock.holder = None
        lock.end()

    def abandon(self) -> bool:
        """Its task waits for the call no more: others wait for its end for a while only.

        Returns whether it has begun; else it will not, and is over.
        """
        if self.is_over:
            return True
        with self.lock.mutex:
            self.abandoned_at, has_begun = system_now(), self.has_begun
            waiting = list(self.lock.queue)
        if not has_begun:
            self.end()
        for each in waiting:
            each.wake()
        return has_begun


class CallLock:
    """First come, first served, for tasks and threads of all event loops. Cancellation safe.

    Creators of one function have one: see `Callee`. A call within a call, such as a run of a
    session that a step function itself opens, takes no turn: it would wait for its own end.

    Args:
        what: what must not overlap, for people.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._busy = threading.Lock()  # locked while a call is under way, in whichever thread
        self.mutex = threading.Lock()  # guards what follows; no task is woken under it
        self.thread = 0  # that makes the call under way, once it has begun
        self.queue: deque[Hold] = deque()
        self.holder: Hold | None = None  # of the call under way, unless `take_here` began it
        self._has_warned = False

    @property
    def is_taken(self) -> bool:
        """Whether a call is under way."""
        return self._busy.locked()

    def take_here(self) -> CallLock | None:
        """As `take_nowait`, for a call that begins at once in this thread; `end` ends it."""
        if self.queue or not self._busy.acquire(False):
            return NO_LOCK if self._is_mine else None
        self.thread = threading.get_ident()
        return self

    def end(self) -> None:
        """The call that `take_here` began has ended."""
        self.thread = 0
        self._busy.release()
        if self.queue:
            self._pass_on()

    def take_nowait(self) -> Hold | None:
        """A hold, if no call is under way and none waits, or the running code is part of it."""
        lock = self.take_here()
        if lock is None:
            return None
        lock.thread = 0  # it has not begun
        hold = lock.holder = Hold(lock)
        return hold

    @property
    def _is_mine(self) -> bool:
        """Whether the running code is part of the call that is under way."""
        outer = [each for each in _under_way.get() if each.lock is self and not each.is_over]
        return self.thread == threading.get_ident() or bool(outer)

    async def take(
        self,
        engine: Engine,
        grace_secs: float,
        *,
        stop: Stop | None = None,
        lost_peer: LostPeer | None = None,
    ) -> Hold:
        """Wait for a hold.

        Args:
            grace_secs: seconds, >= 0, for which it waits for a call that was abandoned.
            stop: ends the wait, as the call is not worth making then.
            lost_peer: says that the call under way will never return.

        Raises:
            OverlappingCallError: a call that was abandoned has not returned.
            StopTraining: the stop came.
        """
        hold = self.take_nowait()
        if hold is not None:
            return hold
        hold = self._enter()
        try:
            while True:
                slot = Slot(engine, f"the end of another call of {self.what}")
                hold.wake = slot.wake
                secs = self._secs_to_wait(hold, grace_secs)
                if secs is None:
                    return hold
                with EndsAtStop(slot, stop, lost_peer):
                    value = await engine.park(slot, engine.now() + secs)
                if value is STOPPED and self.holder is not hold:
                    if lost_peer is not None and lost_peer.is_set:
                        raise lost_peer.error_now()
                    raise StopTraining(f"a stop was requested while waiting for {slot.what}")
        except BaseException:
            hold.end()
            raise

    def held(self, grace_secs: float) -> Hold:
        """Block this thread until no other call is under way; `with` keeps others out of a block.

        Within a call that this thread makes already it does nothing.

        Raises:
            OverlappingCallError: an event loop runs in this thread, and cannot wait here; or a
                call that was abandoned has not returned.
        """
        hold = self.take_nowait()
        if hold is not None:
            return hold
        engine = engine_if_any()
        if engine is not None and not engine.is_elsewhere:
            raise OverlappingCallError(
                f"another call of {self.what} is under way in a thread, and the event loop cannot "
                "wait for it here. Run it through `await session.run(...)` or `await "
                "step_context.run_with_hooks(...)`, or in a plain hook method or step_fn; if calls "
                "may overlap, write FunctionSessionCreator(step, thread_safe=True)"
            )
        event = threading.Event()
        hold = self._enter()
        hold.wake = event.set
        try:
            while (secs := self._secs_to_wait(hold, grace_secs)) is not None:
                event.wait(secs)
                event.clear()  # before the next look
        except BaseException:
            hold.end()
            raise
        return hold

    def _enter(self) -> Hold:
        hold = Hold(self)
        with self.mutex:
            self.queue.append(hold)
        self._pass_on()
        return hold

    def _pass_on(self) -> None:
        """Give the lock to the first in the queue, if it is free."""
        with self.mutex:
            if not self.queue or not self._busy.acquire(blocking=False):
                return
            hold = self.holder = self.queue.popleft()
        hold.wake()

    def _secs_to_wait(self, hold: Hold, grace_secs: float) -> float | None:
        """For how long to wait until the next look; None: it has the lock. Given up, it raises.

        Looked at once the hold can be woken.
        """
        with self.mutex:
            holder, now = self.holder, system_now()
        if holder is hold:
            return None
        until = math.inf if holder is None else max(hold.asked_at, holder.abandoned_at) + grace_secs
        if now >= until:
            raise OverlappingCallError(
                f"a call of {self.what} that was cancelled or given up still runs in its thread, "
                f"{grace_secs:g} s later, and calls must not overlap. Find out why it does not "
                "return, or give the session a longer stop_grace_period_secs; if calls may "
                "overlap, write FunctionSessionCreator(step, thread_safe=True)"
            )
        waited = now - hold.asked_at
        if waited >= _PATIENCE_SECS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Calls of %s run one at a time, and %d wait, for %.3g s by now. If the one under "
                "way waits for another worker, it never returns: then write "
                "FunctionSessionCreator(step, thread_safe=True), if calls may overlap",
                self.what,
                len(self.queue),
                waited,
            )
        return min(until - now, _PATIENCE_SECS)


class _NoLock(CallLock):
    """For calls that may overlap."""

    def take_here(self) -> CallLock:
        return self

    def end(self) -> None:
        """No other call waits."""


NO_LOCK = _NoLock("nothing")
